"""Which group of a recipe a tensor is in, and how many elements its limits allow to prune."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distprune._common.bounds import CEILING, FLOOR, Bounded, to_bounds, violated_bound
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.errors import SelectionError, headline
from distprune.files.formats.header import TensorEntry
from distprune.files.recipe import FileRecipe
from distprune.files.selecting.policy import Verdict, select_tensors, warnings_of

_MAX_PROBLEMS = 12


@dataclass(frozen=True)
class GroupedSelection:
    """Which tensors of a checkpoint are pruned, and in which group.

    Attributes:
        verdicts: of every tensor, in the order of the checkpoint.
        groups: per group of the recipe, its tensors in that order; one group if the recipe has
            none.
        warnings: see :func:`warnings_of`.
    """

    verdicts: tuple[Verdict, ...]
    groups: tuple[list[TensorEntry], ...]
    warnings: tuple[str, ...]


def select_groups(checkpoint: Checkpoint, recipe: FileRecipe) -> GroupedSelection:
    """Decide for every tensor whether it is pruned, and in which group.

    Raises:
        SelectionError: with every problem: those of :func:`select_tensors` for each group, and
            tensors that are in two groups.
    """
    if not recipe.groups:
        verdicts = select_tensors(checkpoint, recipe)
        entries = [verdict.entry for verdict in verdicts if verdict.is_pruned]
        warnings = warnings_of(checkpoint, recipe, verdicts)
        return GroupedSelection(tuple(verdicts), (entries,), warnings)
    by_group, all_warnings = _select_each(checkpoint, recipe.groups)
    merged: list[Verdict] = []
    shared: list[str] = []
    groups: tuple[list[TensorEntry], ...] = tuple([] for _ in by_group)
    for verdicts_of_tensor in zip(*by_group, strict=True):
        verdict, numbers = _merged(verdicts_of_tensor)
        merged.append(verdict)
        for number in numbers:
            groups[number].append(verdict.entry)
        if len(numbers) > 1:
            where = " and ".join(f"groups[{number}]" for number in numbers)
            shared.append(
                f"tensor {verdict.entry.name} is in {where}; expected every tensor in one group at "
                "most, as each has a budget of its own. Exclude it from the others."
            )
    if shared:
        num_more = len(shared) - _MAX_PROBLEMS
        problems = shared[:_MAX_PROBLEMS]
        problems += [f"{num_more} more tensors are in two groups."] if num_more > 0 else []
        raise SelectionError(headline(f"the selection in {checkpoint.folder}", shared), problems)
    return GroupedSelection(tuple(merged), groups, tuple(all_warnings))


def _select_each(
    checkpoint: Checkpoint, recipes: Sequence[FileRecipe]
) -> tuple[list[list[Verdict]], list[str]]:
    """The verdicts of every group, and warnings; raises SelectionError with all problems."""
    problems: list[str] = []
    warnings: list[str] = []
    by_group = []
    for number, recipe in enumerate(recipes):
        try:
            verdicts = select_tensors(checkpoint, recipe)
        except SelectionError as error:
            problems += [f"groups[{number}]: {problem}" for problem in error.problems]
            continue
        by_group.append(verdicts)
        group_warnings = warnings_of(checkpoint, recipe, verdicts)
        warnings += [f"groups[{number}]: {warning}" for warning in group_warnings]
    if problems:
        raise SelectionError(headline(f"the selection in {checkpoint.folder}", problems), problems)
    return by_group, warnings


def _merged(verdicts: Sequence[Verdict]) -> tuple[Verdict, list[int]]:
    """The verdict on a tensor from those of all groups, and the groups that prune it."""
    numbers = [number for number, verdict in enumerate(verdicts) if verdict.is_pruned]
    reasons = {verdict.reason for verdict in verdicts}
    common = reasons.pop() if len(reasons) == 1 else ""
    reason = common if common not in ("", "not included") else "in no group"
    return Verdict(verdicts[0].entry, bool(numbers), "" if numbers else reason), numbers


def limits_of(
    entries: Sequence[TensorEntry], recipe: FileRecipe, num_to_prune: int
) -> list[tuple[int, int]]:
    """How many elements of each tensor have to be pruned at least, and at most.

    Args:
        entries: of a group.
        recipe: of the group.
        num_to_prune: of the group.

    Raises:
        SelectionError: the limits of a tensor contradict each other, or those of all tensors do not
            allow for the number to prune; with the numbers.
    """
    if not recipe.has_limits:
        return [(0, entry.numel) for entry in entries]
    bounded = [Bounded(entry.name, (entry.name,), entry.numel) for entry in entries]
    try:
        bounds = to_bounds(bounded, recipe.min_sparsity, recipe.max_sparsity)
    except ValueError as error:
        raise SelectionError(str(error)) from error
    if bounds is None:
        return [(0, entry.numel) for entry in entries]
    check_budget(num_to_prune, sum(bounds.lowest), sum(bounds.highest), recipe)
    return list(zip(bounds.lowest, bounds.highest, strict=True))


def check_budget(num_to_prune: int, lowest: int, highest: int, recipe: FileRecipe) -> None:
    """Raise SelectionError if the limits of all tensors together do not allow for the number."""
    violated = violated_bound(num_to_prune, lowest, highest)
    budget = f"sparsity {recipe.sparsity} prunes {num_to_prune:,} elements"
    if violated == FLOOR:
        raise SelectionError(
            f"{budget}, but min_sparsity {recipe.min_sparsity} of every tensor needs {lowest:,}. "
            "Raise the sparsity, or lower min_sparsity."
        )
    if violated == CEILING:
        raise SelectionError(
            f"{budget}, but max_sparsity {recipe.max_sparsity} of every tensor leaves {highest:,} "
            "that may go. Lower the sparsity, or raise max_sparsity."
        )
