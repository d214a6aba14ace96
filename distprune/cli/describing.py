"""What several commands say of a checkpoint and of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune.cli.console import Terminal, count, counted, percent, share_text
from distprune.files.text import format_size
from distprune.recipes import GroupRecipe

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.checkpoints.checkpoint import Checkpoint
    from distprune.files.planning import Plan


def note_files(terminal: Terminal, checkpoint: Checkpoint) -> None:
    """Write to stderr where the checkpoint was found and which files are not copied."""
    if checkpoint.note:
        terminal.note(checkpoint.note)
    reasons: dict[str, list[str]] = {}
    for name, reason in checkpoint.skipped:
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        terminal.note(f"Not copied: {', '.join(names)} ({reason}).")


def values_of_files(checkpoint: Checkpoint) -> dict[str, Any]:
    """The files that are copied, and those that are not, for JSON."""
    return {
        "copied": [file.name for file in checkpoint.others],
        "not_copied": dict(checkpoint.skipped),
    }


def show_counts(
    terminal: Terminal, tensors: Iterable[tuple[Any, ...]], more: Sequence[str] = ()
) -> None:
    """Write a table of tensors: name, elements, how many of them are pruned, and more columns."""
    numbers = ("elements", "pruned", "sparsity", *more)
    rows = [
        (name, count(size), count(gone), percent(gone, size), *others)
        for name, size, gone, *others in tensors
    ]
    terminal.table(("tensor", *numbers), rows, right=numbers)


def discard_unfinished(terminal: Terminal, destination: Path) -> None:
    """Remove the unfinished results of a destination, and write how large they were."""
    if not terminal.is_leader:
        return
    from distprune.files.output import discard

    removed = discard(destination)
    if terminal.as_json:
        folders = [{"folder": path, "num_bytes": num_bytes} for path, num_bytes in removed]
        terminal.json({"discarded": folders})
        return
    for path, num_bytes in removed:
        terminal.text(f"Removed {path}, which took {format_size(num_bytes)} of the disk.")
    if not removed:
        terminal.text(f"There is no unfinished result of {destination}.")


# Magnitudes alone ruined the language model that was measured; docs/criteria.md has the table.
_TOO_MUCH_BY_MAGNITUDE = 0.4


def show_warnings(terminal: Terminal, plan: Plan) -> None:
    """Write warnings about a selection that is probably a mistake to stderr."""
    warnings = list(plan.warnings)
    names = plan.checkpoint.config.get("architectures")
    is_causal = isinstance(names, list) and any(str(n).endswith("ForCausalLM") for n in names)
    is_much = plan.num_to_prune >= _TOO_MUCH_BY_MAGNITUDE * plan.num_elements
    if is_causal and is_much and any(group.recipe.ranks_magnitudes for group in plan.groups):
        warnings.append(
            f"pruning {plan.num_to_prune / plan.num_elements:.0%} of a language model by magnitude "
            "may ruin it. With text such as it was trained on (--text FILE), gradients rank its "
            "weights, and the kept ones move: that loses far less. distprune eval measures it."
        )
    for warning in warnings:
        terminal.note(f"Warning: {warning}")
    if any(group.recipe.ranks_raw for group in plan.groups if group.last - group.first > 1):
        terminal.note(
            "Raw scores of several tensors are ranked together (normalize: none). Where their "
            "scales differ, this may empty some of them; normalize: rms divides each tensor by its "
            "rms first."
        )


def summary(plan: Plan, *, has_amount: bool = True) -> str:
    """A plan in one sentence."""
    if not has_amount:
        return (
            f"Selects {count(plan.num_elements)} elements in {count(len(plan.tensors))} of "
            f"{counted(len(plan.verdicts), 'tensor')}. No sparsity is given: --sparsity, --pattern "
            "or --recipe says how many of them are pruned."
        )
    files = counted(len(plan.checkpoint.files), "weight file")
    others = counted(len(plan.copied), "other file")
    is_one = len(plan.groups) == 1
    how = ranking_text(plan.groups[0].recipe) if is_one else f"in {len(plan.groups)} groups"
    return (
        f"Prunes {share_text(plan.num_to_prune, plan.num_elements)} in {count(len(plan.tensors))} "
        f"of {counted(len(plan.verdicts), 'tensor')}, {how}; "
        f"{format_size(plan.checkpoint.num_bytes)} in {files}, {others} copied."
    )


def ranking_text(recipe: GroupRecipe) -> str:
    """How the tensors of a recipe without groups are ranked."""
    if recipe.pattern is not None:
        return f"keeping {recipe.pattern}"
    together = {"global": "together", "layer": "each on its own", "row": "row by row"}
    limits = ""
    if recipe.has_limits:
        low, high = (f"{100 * share:g}" for share in (recipe.min_sparsity, recipe.max_sparsity))
        limits = f", each tensor within {low} to {high} %"
    how = together[recipe.scope]
    if recipe.budget is not None:
        how = f"{together['layer']}, divided by budget {recipe.budget},"
    return f"ranked {how} by {recipe.score_text}{limits}"
