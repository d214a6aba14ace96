"""``distprune plan``: what would be pruned, from headers alone."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from distprune.cli import choosing, costing, exits, sources
from distprune.cli.console import Terminal, count, counted, duration, percent, size
from distprune.cli.options import AsJson, Quiet, Verbose
from distprune.files.planning import Plan, PlannedTensor
from distprune.files.recipe import FileRecipe
from distprune.files.selecting.policy import Choice

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A folder with safetensors files, such a file, or the name of a model that is in the "
        "local Hugging Face cache (org/name).",
        show_default=False,
    ),
]


MaybeDestination = Annotated[
    Path | None,
    typer.Argument(
        metavar="DST",
        help="Where prune will write: whether there is room. Nothing is written now.",
        show_default=False,
    ),
]
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def plan(
    source: Source,
    destination: MaybeDestination = None,
    recipe: choosing.RecipeName = None,
    sparsity: choosing.Sparsity = None,
    pattern: choosing.Pattern = None,
    scope: choosing.Scope = None,
    score: choosing.Score = None,
    seed: choosing.Seed = None,
    include: choosing.Include = None,
    also: choosing.Also = None,
    exclude: choosing.Exclude = None,
    min_ndim: choosing.MinNdim = None,
    min_sparsity: choosing.MinSparsity = None,
    max_sparsity: choosing.MaxSparsity = None,
    input_dim: choosing.InputDim = None,
    nan: choosing.Nan = None,
    follow_links: sources.FollowLinks = False,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Show what would be pruned, what not and why; the disk space and the time that it takes.

    Reads headers, and a few megabytes to see how fast the disk is; writes nothing. Without a
    sparsity, a pattern or a recipe it shows what the default selection is. Names that differ in
    numbers only share a line; -v lists every tensor. Ends with 4 if there is no room at DST.

    [bold]Examples[/bold]

      distprune plan Llama-3.2-1B

      distprune plan Llama-3.2-1B Llama-3.2-1B-50 --sparsity 0.5

      distprune plan Llama-3.2-1B -r semi_structured_2_4 --exclude "*.up_proj.*"
    """
    from distprune.files.planning import plan as make_plan

    # Without an amount there is still a selection.
    has_amount = not (recipe is None and sparsity is None and pattern is None)
    chosen = choosing.resolve(
        recipe,
        {
            "sparsity": sparsity if has_amount else 0.0, "pattern": pattern, "scope": scope,
            "score": score, "seed": seed, "include": include, "also": also, "exclude": exclude,
            "min_ndim": min_ndim, "input_dims": input_dim, "nan": nan,
            "min_sparsity": min_sparsity, "max_sparsity": max_sparsity,
        },
    )  # fmt: skip
    made = make_plan(source, chosen, follow_links=follow_links)
    cost = costing.estimate(made, destination)
    terminal = Terminal(as_json, -1 if quiet else verbose)
    sources.tell(terminal, made.checkpoint)
    show_warnings(terminal, made)
    if as_json:
        terminal.json(as_values(made, has_amount) | {"cost": asdict(cost) | {"fits": cost.fits}})
    else:
        show(terminal, made, one_by_one=verbose > 0, has_amount=has_amount)
        _show_cost(terminal, cost, destination)
    if cost.fits is False:
        raise typer.Exit(exits.OUTPUT)


def show_warnings(terminal: Terminal, plan: Plan) -> None:
    """On stderr: what is probably not meant."""
    for warning in plan.warnings:
        terminal.note(f"Warning: {warning}")


def show(terminal: Terminal, plan: Plan, *, one_by_one: bool, has_amount: bool = True) -> None:
    """Write a plan as a table, and a line that sums it up."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}
    lines: dict[tuple[Any, ...], list[Choice]] = {}
    for choice in plan.choices:
        entry = choice.entry
        name = entry.name if one_by_one else _NUMBER.sub("*", entry.name)
        group = planned[entry.name].group if choice.is_pruned else 0
        key = (name, entry.dtype, entry.shape, choice.reason, group)
        lines.setdefault(key, []).append(choice)
    rows = []
    for (name, dtype, shape, reason, group), choices in lines.items():
        names = [choice.entry.name for choice in choices]
        counts = [_count(planned[each]) for each in names if each in planned]
        known = has_amount and counts and None not in counts
        what = f"keep: {reason}" if reason else f"prune {count(sum(counts))}" if known else "prune"
        if not reason and len(plan.groups) > 1:
            what += f", group {group}"
        elements = sum(choice.entry.numel for choice in choices)
        rows.append((name, count(len(choices)), dtype, _shape(shape), count(elements), what))
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
            _ranking(group.recipe),
            ", ".join(group.recipe.include or ("by default",)),
        )
        for number, group in enumerate(plan.groups)
    ]
    numbers = ("group", "tensors", "elements", "to prune", "sparsity")
    terminal.table((*numbers, "how", "what"), rows, right=numbers)


def _show_cost(terminal: Terminal, cost: costing.Cost, destination: Path | None) -> None:
    least, most = map(duration, cost.seconds)
    speed = ""
    if cost.sampled_bytes_per_second is not None:
        speed = f" A piece was read at {size(cost.sampled_bytes_per_second)}/s just now."
    terminal.text(
        f"Pruning reads {size(cost.read_bytes)} and writes {size(cost.write_bytes)}; that takes "
        f"one process from {least} to {most}.{speed}"
    )
    if destination is None:
        return
    if os.path.lexists(destination):
        terminal.text(f"{destination} exists already.")
    room = f"{size(cost.missing_bytes)} are needed and {size(cost.free_bytes or 0)} are free"
    terminal.text(f"{'' if cost.fits else 'There is no room for it: '}{room} at {destination}.")


def summary(plan: Plan, *, has_amount: bool = True) -> str:
    """One sentence."""
    if not has_amount:
        return (
            f"Selects {count(plan.num_elements)} elements in {count(len(plan.tensors))} of "
            f"{counted(len(plan.choices), 'tensor')}. No sparsity is given: --sparsity, --pattern "
            "or --recipe says how many of them are pruned."
        )
    files = counted(len(plan.checkpoint.files), "weight file")
    others = counted(len(plan.copied), "other file")
    is_one = len(plan.groups) == 1
    how = _ranking(plan.groups[0].recipe) if is_one else f"in {len(plan.groups)} groups"
    return (
        f"Prunes {count(plan.num_to_prune)} of {count(plan.num_elements)} elements "
        f"({percent(plan.num_to_prune, plan.num_elements)}) in {count(len(plan.tensors))} of "
        f"{counted(len(plan.choices), 'tensor')}, {how}; "
        f"{size(plan.checkpoint.num_bytes)} in {files}, {others} copied."
    )


def as_values(plan: Plan, has_amount: bool = True) -> dict[str, Any]:
    """A plan as plain values, for JSON; without an amount, all that depends on it is None."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}

    def to_prune(choice: Choice) -> int | None:
        if not choice.is_pruned:
            return 0
        return _count(planned[choice.entry.name]) if has_amount else None

    return {
        "source": plan.checkpoint.folder,
        "recipe": plan.recipe.as_mapping() if has_amount else None,
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
                "name": choice.entry.name,
                "file": choice.entry.file,
                "dtype": choice.entry.dtype,
                "shape": list(choice.entry.shape),
                "is_pruned": choice.is_pruned,
                "reason": choice.reason,
                "num_to_prune": to_prune(choice),
                "group": planned[choice.entry.name].group if choice.is_pruned else None,
            }
            for choice in plan.choices
        ],
        "weight_files": {file.name: file.size for file in plan.checkpoint.files},
        **sources.as_values(plan.checkpoint),
        "copied": [file.name for file in plan.copied],
    }


def _count(tensor: PlannedTensor) -> int | None:
    """How many elements of a tensor go; None if only its weights can tell."""
    if tensor.num_groups:
        return tensor.num_groups * tensor.num_pruned_per_group
    return tensor.lowest if tensor.lowest == tensor.highest else None


def _ranking(recipe: FileRecipe) -> str:
    if recipe.pattern is not None:
        return f"keeping {recipe.pattern}"
    together = {"global": "together", "layer": "each on its own", "row": "row by row"}
    limits = ""
    if recipe.has_limits:
        low, high = (f"{100 * share:g}" for share in (recipe.min_sparsity, recipe.max_sparsity))
        limits = f", each tensor within {low} to {high} %"
    return f"ranked {together[recipe.scope]} by {recipe.score}{limits}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
