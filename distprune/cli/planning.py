"""``distprune plan``: what would be pruned, from headers alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from distprune.cli import choosing
from distprune.cli.console import Terminal, count, counted, percent, size
from distprune.cli.options import AsJson, Quiet, Verbose
from distprune.files.planning import Plan
from distprune.files.policy import Choice

Source = Annotated[
    Path, typer.Argument(metavar="SRC", help="A folder with safetensors files.", show_default=False)
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
    exclude: choosing.Exclude = None,
    min_ndim: choosing.MinNdim = None,
    nan: choosing.Nan = None,
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
            "seed": seed, "include": include, "exclude": exclude, "min_ndim": min_ndim,
            "nan": nan,
        },
    )  # fmt: skip
    made = make_plan(source, chosen)
    terminal = Terminal(as_json, -1 if quiet else verbose)
    if as_json:
        terminal.json(as_values(made))
    else:
        show(terminal, made, one_by_one=verbose > 0)


def show(terminal: Terminal, plan: Plan, *, one_by_one: bool) -> None:
    """Write a plan as a table, and a line that sums it up."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}
    lines: dict[tuple[str, ...], list[Choice]] = {}
    for choice in plan.choices:
        entry = choice.entry
        name = entry.name if one_by_one else re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name)
        key = (name, entry.dtype, _shape(entry.shape), choice.reason)
        lines.setdefault(key, []).append(choice)
    rows = []
    for (name, dtype, shape, reason), choices in lines.items():
        names = [choice.entry.name for choice in choices]
        counts = [_count(planned[each]) for each in names if each in planned]
        known = all(each is not None for each in counts) and counts
        what = f"keep: {reason}" if reason else f"prune {count(sum(counts))}" if known else "prune"
        elements = sum(choice.entry.numel for choice in choices)
        rows.append((name, count(len(choices)), dtype, shape, count(elements), what))
    terminal.table(
        ("tensor", "number", "dtype", "shape", "elements", "plan"),
        rows,
        right=("number", "elements"),
    )
    terminal.text()
    terminal.text(summary(plan))
    for name, reason in plan.checkpoint.skipped:
        terminal.text(f"Not copied: {name} ({reason}).")


def summary(plan: Plan) -> str:
    """One sentence."""
    files = counted(len(plan.checkpoint.files), "weight file")
    others = counted(len(plan.copied), "other file")
    return (
        f"Prunes {count(plan.num_to_prune)} of {count(plan.num_elements)} elements "
        f"({percent(plan.num_to_prune, plan.num_elements)}) in {count(len(plan.tensors))} of "
        f"{counted(len(plan.choices), 'tensor')}, {_ranking(plan)}; "
        f"{size(plan.checkpoint.num_bytes)} in {files}, {others} copied."
    )


def as_values(plan: Plan) -> dict[str, Any]:
    """A plan as plain values, for JSON."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}
    recipe = plan.recipe
    return {
        "source": plan.checkpoint.folder,
        "recipe": recipe.as_mapping() if isinstance(recipe, choosing.CommandRecipe) else None,
        "digest": plan.digest,
        "num_elements": plan.num_elements,
        "num_to_prune": plan.num_to_prune,
        "tensors": [
            {
                "name": choice.entry.name,
                "file": choice.entry.file,
                "dtype": choice.entry.dtype,
                "shape": list(choice.entry.shape),
                "is_pruned": choice.is_pruned,
                "reason": choice.reason,
                "num_to_prune": _count(planned[choice.entry.name]) if choice.is_pruned else 0,
            }
            for choice in plan.choices
        ],
        "weight_files": {file.name: file.size for file in plan.checkpoint.files},
        "copied": [file.name for file in plan.copied],
        "not_copied": dict(plan.checkpoint.skipped),
    }


def _count(tensor: Any) -> int | None:
    """How many elements of a tensor go; None if only its weights can tell."""
    return tensor.num_groups * tensor.num_pruned_per_group if tensor.num_groups else None


def _ranking(plan: Plan) -> str:
    if plan.recipe.pattern is not None:
        return f"keeping {plan.recipe.pattern}"
    together = {"global": "together", "layer": "each on its own", "row": "row by row"}
    return f"ranked {together[plan.recipe.scope]} by {plan.recipe.score}"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
