"""``distprune plan``: what would be pruned, from headers alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from distprune.cli import choosing, sources
from distprune.cli.console import Terminal, count, counted, percent, size
from distprune.cli.options import AsJson, Quiet, Verbose
from distprune.files.planning import Plan, PlannedTensor
from distprune.files.policy import Choice
from distprune.files.recipe import FileRecipe

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A folder with safetensors files, such a file, or the name of a model that is in the "
        "local Hugging Face cache (org/name).",
        show_default=False,
    ),
]


def plan(
    source: Source,
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
    """Show what would be pruned, what not and why. Reads headers only and writes nothing.

    Names that differ in numbers only share a line; -v lists every tensor.

    [bold]Examples[/bold]

      distprune plan Llama-3.2-1B --sparsity 0.5

      distprune plan Llama-3.2-1B -r semi_structured_2_4 --exclude "*.mlp.down_proj.*" -v
    """
    from distprune.files.planning import plan as make_plan

    chosen = choosing.resolve(
        recipe,
        {
            "sparsity": sparsity, "pattern": pattern, "scope": scope, "score": score,
            "seed": seed, "include": include, "also": also, "exclude": exclude,
            "min_ndim": min_ndim, "input_dims": input_dim, "nan": nan,
            "min_sparsity": min_sparsity, "max_sparsity": max_sparsity,
        },
    )  # fmt: skip
    made = make_plan(source, chosen, follow_links=follow_links)
    terminal = Terminal(as_json, -1 if quiet else verbose)
    sources.tell(terminal, made.checkpoint)
    show_warnings(terminal, made)
    if as_json:
        terminal.json(as_values(made))
    else:
        show(terminal, made, one_by_one=verbose > 0)


def show_warnings(terminal: Terminal, plan: Plan) -> None:
    """On stderr: what is probably not meant."""
    for warning in plan.warnings:
        terminal.note(f"Warning: {warning}")


def show(terminal: Terminal, plan: Plan, *, one_by_one: bool) -> None:
    """Write a plan as a table, and a line that sums it up."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}
    lines: dict[tuple[Any, ...], list[Choice]] = {}
    for choice in plan.choices:
        entry = choice.entry
        name = entry.name if one_by_one else re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name)
        group = planned[entry.name].group if choice.is_pruned else 0
        key = (name, entry.dtype, _shape(entry.shape), choice.reason, group)
        lines.setdefault(key, []).append(choice)
    rows = []
    for (name, dtype, shape, reason, group), choices in lines.items():
        names = [choice.entry.name for choice in choices]
        counts = [_count(planned[each]) for each in names if each in planned]
        known = all(each is not None for each in counts) and counts
        what = f"keep: {reason}" if reason else f"prune {count(sum(counts))}" if known else "prune"
        if not reason and len(plan.groups) > 1:
            what += f", group {group}"
        elements = sum(choice.entry.numel for choice in choices)
        rows.append((name, count(len(choices)), dtype, shape, count(elements), what))
    terminal.table(
        ("tensor", "number", "dtype", "shape", "elements", "plan"),
        rows,
        right=("number", "elements"),
    )
    terminal.text()
    if len(plan.groups) > 1:
        _show_groups(terminal, plan)
        terminal.text()
    terminal.text(summary(plan))


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


def summary(plan: Plan) -> str:
    """One sentence."""
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


def as_values(plan: Plan) -> dict[str, Any]:
    """A plan as plain values, for JSON."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}
    return {
        "source": plan.checkpoint.folder,
        "recipe": plan.recipe.as_mapping(),
        "digest": plan.digest,
        "warnings": list(plan.warnings),
        "num_elements": plan.num_elements,
        "num_to_prune": plan.num_to_prune,
        "groups": [
            {
                "index": number,
                "num_tensors": group.last - group.first,
                "num_elements": group.num_elements,
                "num_to_prune": group.num_to_prune,
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
                "num_to_prune": _count(planned[choice.entry.name]) if choice.is_pruned else 0,
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
