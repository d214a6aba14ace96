"""A plan as a table, as one sentence, and as JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distprune.cli import folders
from distprune.cli.console import Terminal, count, counted, percent, shape_text, without_numbers
from distprune.files.text import format_size

if TYPE_CHECKING:
    from distprune.files.planning import Plan, PlannedTensor
    from distprune.files.recipe import FileRecipe
    from distprune.files.selecting import Verdict


# Magnitudes alone ruined the language model that was measured; docs/criteria.md has the table.
_TOO_MUCH_BY_MAGNITUDE = 0.4


def advice_for_language_models(plan: Plan) -> str:
    """What a language model is better pruned by, if much of it is pruned by magnitude; or ""."""
    names = plan.checkpoint.config.get("architectures")
    if not isinstance(names, list) or not any(str(n).endswith("ForCausalLM") for n in names):
        return ""
    is_by_magnitude = any(group.recipe.ranks_magnitudes for group in plan.groups)
    if not is_by_magnitude or plan.num_to_prune < _TOO_MUCH_BY_MAGNITUDE * plan.num_elements:
        return ""
    recipe = plan.recipe
    how = "--score wanda --statistics FILE"
    if recipe.groups:
        how = "score: wanda in the recipe, and --statistics FILE"
    elif (
        recipe.pattern is None
        and not (recipe.has_limits or recipe.budget)
        and recipe.normalize in (None, "rms")
    ):
        how += " --scope row"
    return (
        f"pruning {plan.num_to_prune / plan.num_elements:.0%} of a language model by magnitude may "
        f"ruin it. Statistics of activations (distprune calibrate, then {how}) lose far less; "
        "distprune eval measures it."
    )


def show_warnings(terminal: Terminal, plan: Plan) -> None:
    """Write warnings about a selection that is probably a mistake to stderr."""
    for warning in plan.warnings:
        terminal.note(f"Warning: {warning}")
    if advice := advice_for_language_models(plan):
        terminal.note(f"Warning: {advice}")
    if any(
        group.recipe.is_normalizable and group.recipe.normalize is None
        for group in plan.groups
        if group.last - group.first > 1
    ):
        are_weights = all(group.recipe.ranks_magnitudes for group in plan.groups)
        what = "magnitudes" if are_weights else "scores"
        option = "" if plan.recipe.groups else "--normalize rms, or "
        terminal.note(
            f"Raw {what} of several tensors are ranked together (normalize: none). Where their "
            f"scales differ, this may empty some of them; {option}normalize: rms in a recipe, "
            "divides each tensor by its rms first."
        )


def show(terminal: Terminal, plan: Plan, *, one_by_one: bool, has_amount: bool = True) -> None:
    """Write a plan as a table and a summary."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}
    lines: dict[tuple[Any, ...], list[Verdict]] = {}
    for verdict in plan.verdicts:
        entry = verdict.entry
        name = entry.name if one_by_one else without_numbers(entry.name)
        group = planned[entry.name].group if verdict.is_pruned else 0
        key = (name, entry.dtype, entry.shape, verdict.reason, group)
        lines.setdefault(key, []).append(verdict)
    rows = []
    for (name, dtype, shape, reason, group), verdicts in lines.items():
        names = [verdict.entry.name for verdict in verdicts]
        if reason:
            action = f"keep: {reason}"
        else:
            counts = [_count(plan, planned[name]) for name in names if name in planned]
            numbers = [number for number in counts if number is not None]
            is_known = has_amount and 0 < len(counts) == len(numbers)
            action = f"prune {count(sum(numbers))}" if is_known else "prune"
            if len(plan.groups) > 1:
                action += f", group {group}"
        elements = sum(verdict.entry.numel for verdict in verdicts)
        rows.append((name, count(len(verdicts)), dtype, shape_text(shape), count(elements), action))
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
        f"Prunes {count(plan.num_to_prune)} of {count(plan.num_elements)} elements "
        f"({percent(plan.num_to_prune, plan.num_elements)}) in {count(len(plan.tensors))} of "
        f"{counted(len(plan.verdicts), 'tensor')}, {how}; "
        f"{format_size(plan.checkpoint.num_bytes)} in {files}, {others} copied."
    )


def as_values(plan: Plan, has_amount: bool = True) -> dict[str, Any]:
    """A plan as plain values, for JSON; without an amount, what depends on it is None."""
    planned = {tensor.entry.name: tensor for tensor in plan.tensors}

    def to_prune(verdict: Verdict) -> int | None:
        if not verdict.is_pruned:
            return 0
        return _count(plan, planned[verdict.entry.name]) if has_amount else None

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
                "name": verdict.entry.name,
                "file": verdict.entry.file,
                "dtype": verdict.entry.dtype,
                "shape": list(verdict.entry.shape),
                "is_pruned": verdict.is_pruned,
                "reason": verdict.reason,
                "num_to_prune": to_prune(verdict),
                "group": planned[verdict.entry.name].group if verdict.is_pruned else None,
            }
            for verdict in plan.verdicts
        ],
        "weight_files": {file.name: file.size for file in plan.checkpoint.files},
        **folders.as_values(plan.checkpoint),
        "copied": [file.name for file in plan.copied],
    }


def _count(plan: Plan, tensor: PlannedTensor) -> int | None:
    """Number of elements of a tensor to prune; None if it depends on the weights."""
    if tensor.num_groups:
        size = plan.groups[tensor.group].recipe.group_rule.tile_size
        return tensor.num_groups * tensor.num_pruned_per_group * size
    if tensor.budgeted is not None:
        return tensor.budgeted
    return tensor.lowest if tensor.lowest == tensor.highest else None


def ranking_text(recipe: FileRecipe) -> str:
    """How the tensors of a recipe without groups are ranked."""
    if recipe.tile is not None:
        rows = {"global": "together", "layer": "tensor by tensor", "row": "row by row"}
        return f"whole tiles {recipe.pattern}, ranked {rows[recipe.scope]} by {recipe.score_text}"
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
