"""``distprune plan``: what would be pruned, from headers alone, and what it costs."""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distprune.base.garbage import without_garbage_collection
from distprune.base.mask_bits import num_bytes_of
from distprune.cli import process
from distprune.cli.console import Terminal, count, percent, shape_text, without_numbers
from distprune.cli.describing import (
    note_files,
    ranking_text,
    show_warnings,
    summary,
    values_of_files,
)
from distprune.cli.options import ESSENTIAL, OutputOptions, command, made, recipe_option, source
from distprune.cli.pruning_by_text import TextOptions, chosen_recipe, cost_by_text, cost_text
from distprune.files.errors import OutputError
from distprune.files.output import folder_bytes, free_bytes, partial_folders
from distprune.files.text import format_size
from distprune.recipes import Recipe

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.planning import Plan, PlannedTensor


@without_garbage_collection()
def show(
    terminal: Terminal, plan: Plan, values: dict[str, Any], *, one_by_one: bool, has_amount: bool
) -> None:
    """Write a plan, of which the values are known, as a table and a summary."""
    lines: dict[tuple[Any, ...], list[int | None]] = {}
    for each in values["tensors"]:
        name = each["name"] if one_by_one else without_numbers(each["name"])
        key = (name, each["dtype"], tuple(each["shape"]), each["reason"], each["group"])
        lines.setdefault(key, []).append(each["num_to_prune"])
    rows = []
    for (name, dtype, shape, reason, group), numbers in lines.items():
        action = f"keep: {reason}"
        if not reason:
            known = [number for number in numbers if number is not None]
            action = f"prune {sum(known):,}" if len(known) == len(numbers) else "prune"
            action += f", group {group}" if len(plan.groups) > 1 else ""
        elements = len(numbers) * math.prod(shape)
        rows.append((name, count(len(numbers)), dtype, shape_text(shape), count(elements), action))
    terminal.table(
        ("tensor", "number", "dtype", "shape", "elements", "plan"),
        rows,
        right=("number", "elements"),
    )
    terminal.text()
    if has_amount and len(plan.groups) > 1:
        _show_groups(terminal, plan)
        terminal.text()
    terminal.text(summary(plan, has_amount=has_amount))


def _show_groups(terminal: Terminal, plan: Plan) -> None:
    rows = [
        (
            str(number),
            count(group.last - group.first),
            count(group.num_elements),
            count(group.num_to_prune),
            percent(group.num_to_prune, group.num_elements),
            ranking_text(group.recipe),
            ", ".join(group.recipe.include or ("by default",)),
        )
        for number, group in enumerate(plan.groups)
    ]
    numbers = ("group", "tensors", "elements", "to prune", "sparsity")
    terminal.table((*numbers, "how", "what"), rows, right=numbers)


@without_garbage_collection()
def as_values(plan: Plan, has_amount: bool) -> dict[str, Any]:
    """A plan as plain values, for JSON; without an amount, what depends on it is None."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}
    to_prune = {name: _count(tensor) if has_amount else None for name, tensor in planned.items()}
    return {
        "source": plan.checkpoint.folder,
        "recipe": plan.recipe.as_values() if has_amount else None,
        "digest": plan.digest if has_amount else None,
        "warnings": list(plan.warnings),
        "num_elements": plan.num_elements,
        "num_to_prune": plan.num_to_prune if has_amount else None,
        "groups": [
            {
                "index": number,
                "num_tensors": group.last - group.first,
                "num_elements": group.num_elements,
                "num_to_prune": group.num_to_prune if has_amount else None,
            }
            for number, group in enumerate(plan.groups)
        ],
        "tensors": [
            {
                "name": entry.name,
                "file": entry.file,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "is_pruned": is_pruned,
                "reason": reason,
                "num_to_prune": to_prune[entry.name] if is_pruned else 0,
                "group": planned[entry.name].group if is_pruned else None,
            }
            for entry, is_pruned, reason in plan.verdicts
        ],
        "weight_files": {file.name: file.size for file in plan.checkpoint.files},
        **values_of_files(plan.checkpoint),
        "copied": [file.name for file in plan.copied],
    }


def _count(tensor: PlannedTensor) -> int | None:
    """Number of elements of a tensor to prune; None if it depends on the weights."""
    if tensor.num_to_prune is not None:
        return tensor.num_to_prune
    return tensor.lowest if tensor.lowest == tensor.highest else None


def estimate(plan: Plan, destination: Path | None, other_bytes: int = 0) -> dict[str, Any]:
    """What a plan needs; masks and report are estimated.

    Args:
        other_bytes: that something else needs at the destination for a while.

    Returns:
        Bytes that are read and written, and those that are missing on the disk, where an unfinished
        result has some. Bytes that are free there, and whether they suffice; None without a
        destination.
    """
    from distprune.files.planning import bytes_to_count

    checkpoint = plan.checkpoint
    others = sum(file.size for file in checkpoint.others)
    reads = checkpoint.num_bytes + others + bytes_to_count(plan)
    writes = checkpoint.num_bytes + others + _sidecar_bytes(plan)
    free, missing = None, writes
    if destination is not None:
        path = Path(os.path.abspath(destination))
        if not path.parent.is_dir():
            raise OutputError(f"{path.parent} is not a folder; create it first.")
        num_written = sum(map(folder_bytes, partial_folders(path)))
        free, missing = free_bytes(path.parent), max(writes + other_bytes - num_written, 0)
    return {
        "read_bytes": reads,
        "write_bytes": writes,
        "missing_bytes": missing,
        "free_bytes": free,
        "fits": None if free is None else missing <= free,
    }


def _sidecar_bytes(plan: Plan) -> int:
    """Bytes of the masks and the report."""
    masks = sum(num_bytes_of(tensor.entry.numel) for tensor in plan.tensors)
    names = sum(len(verdict.entry.name) + 200 for verdict in plan.verdicts)
    return masks * plan.recipe.masks + 2 * names


@command("plan", Recipe, TextOptions, OutputOptions, first=ESSENTIAL)
@source
@click.argument("destination", metavar="[DST]", type=Path, required=False)
@recipe_option
@without_garbage_collection()
def plan(
    context: click.Context, source: Path, destination: Path | None, recipe: str | None
) -> None:
    """Show what would be pruned, what would not and why, and the disk space that is needed.

    Reads headers alone; writes nothing. Without a sparsity, a pattern or a recipe, it shows the
    default selection. Names that differ only in numbers share a line; -v lists every tensor. The
    exit code is 1 if there is not enough space at DST.

    \b
    distprune plan Llama-3.2-1B Llama-3.2-1B-50 -s 0.5
    distprune plan Llama-3.2-1B -r semi_structured_2_4 --exclude "*.up_proj.*"
    distprune plan Llama-3-70B -s 0.6 --text train.txt --length 2048
    """
    from distprune.files.planning import plan as make_plan

    output, by_text = made(context, OutputOptions), made(context, TextOptions)
    by_text.check()
    # Without an amount there is still a selection.
    has_amount = recipe is not None or not {"sparsity", "pattern"}.isdisjoint(context.obj[Recipe])
    if not has_amount:
        context.obj[Recipe]["sparsity"] = 0.0
    chosen = chosen_recipe(context, recipe, by_text)
    text_cost = cost_by_text(source, chosen, by_text) if by_text.texts else None
    awaits = text_cost is not None and chosen.statistics is None
    plan = make_plan(source, chosen, awaits_statistics=awaits)
    cost = estimate(plan, destination, 0 if text_cost is None else text_cost.disk)
    terminal = output.terminal()
    note_files(terminal, plan.checkpoint)
    show_warnings(terminal, plan)
    values = as_values(plan, has_amount)
    if output.as_json:
        values["cost"] = cost
        if text_cost is not None:
            values["cost_by_text"] = asdict(text_cost)
        terminal.json(values)
    else:
        show(terminal, plan, values, one_by_one=output.verbose, has_amount=has_amount)
        if text_cost is not None:
            terminal.text(cost_text(text_cost))
        _show_cost(terminal, cost, destination)
    if cost["fits"] is False:
        context.exit(process.FAILURE)


def _show_cost(terminal: Terminal, cost: dict[str, Any], destination: Path | None) -> None:
    sizes = {key: format_size(cost[key] or 0) for key in cost if key != "fits"}
    terminal.text(f"Pruning reads {sizes['read_bytes']} and writes {sizes['write_bytes']}.")
    if destination is not None:
        lack = "" if cost["fits"] else "There is not enough space: "
        terminal.text(
            f"{lack}{sizes['missing_bytes']} are needed and {sizes['free_bytes']} are free at "
            f"{destination}."
        )
