"""Which group of a recipe a tensor is in, and how many elements its limits allow to prune."""

from __future__ import annotations

from collections.abc import Sequence

from distprune._common.bounds import Bounded, to_bounds
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.errors import SelectionError, headline
from distprune.files.formats.header import TensorEntry
from distprune.files.recipe import FileRecipe
from distprune.files.selecting.policy import Choice, choose, warnings_of

_MAX_PROBLEMS = 12


def choose_groups(
    checkpoint: Checkpoint, recipe: FileRecipe
) -> tuple[list[Choice], list[list[TensorEntry]], tuple[str, ...]]:
    """Decide for every tensor whether it is pruned, and in which group.

    Returns:
        What becomes of every tensor, in the order of the checkpoint; of every group its
        tensors, in that order; and warnings, see :func:`warnings_of`.

    Raises:
        SelectionError: with every problem: those of :func:`choose` for each group, and tensors
            that are in two groups.
    """
    if not recipe.groups:
        choices = choose(checkpoint, recipe)
        entries = [choice.entry for choice in choices if choice.is_pruned]
        return choices, [entries], warnings_of(checkpoint, recipe, choices)
    problems: list[str] = []
    columns = []
    warnings: list[str] = []
    for number, group in enumerate(recipe.groups):
        try:
            columns.append(choose(checkpoint, group))
        except SelectionError as error:
            problems += [f"groups[{number}]: {problem}" for problem in error.problems]
        else:
            found = warnings_of(checkpoint, group, columns[-1])
            warnings += [f"groups[{number}]: {warning}" for warning in found]
    if problems:
        raise SelectionError(headline(f"the selection in {checkpoint.folder}", problems), problems)
    choices, shared = [], []
    groups: list[list[TensorEntry]] = [[] for _ in columns]
    for row in zip(*columns, strict=True):
        entry = row[0].entry
        found = [number for number, choice in enumerate(row) if choice.is_pruned]
        for number in found:
            groups[number].append(entry)
        if len(found) > 1:
            where = " and ".join(f"groups[{number}]" for number in found)
            shared.append(
                f"tensor {entry.name} is in {where}; expected every tensor in one group at most, "
                "as each has a budget of its own. Exclude it from the others."
            )
        reasons = {choice.reason for choice in row}
        common = reasons.pop() if len(reasons) == 1 else ""
        reason = common if common != "not included" and common else "in no group"
        choices.append(Choice(entry, bool(found), "" if found else reason))
    if shared:
        more = len(shared) - _MAX_PROBLEMS
        problems = shared[:_MAX_PROBLEMS]
        problems += [f"{more} more tensors are in two groups."] if more > 0 else []
        raise SelectionError(headline(f"the selection in {checkpoint.folder}", shared), problems)
    return choices, groups, tuple(warnings)


def limits_of(
    entries: Sequence[TensorEntry], recipe: FileRecipe, num_to_prune: int
) -> list[tuple[int, int]]:
    """How many elements of each tensor have to, and may, be pruned.

    Args:
        entries: of a group.
        recipe: of the group.
        num_to_prune: of the group.

    Raises:
        SelectionError: the limits of a tensor cannot be met, or those of all do not allow for the
            number to prune; with the numbers.
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
    asked = f"sparsity {recipe.sparsity} prunes {num_to_prune:,} elements"
    if lowest > num_to_prune:
        raise SelectionError(
            f"{asked}, but min_sparsity {recipe.min_sparsity} of every tensor needs {lowest:,}. "
            "Raise the sparsity, or lower min_sparsity."
        )
    if highest < num_to_prune:
        raise SelectionError(
            f"{asked}, but max_sparsity {recipe.max_sparsity} of every tensor leaves {highest:,} "
            "that may go. Lower the sparsity, or raise max_sparsity."
        )
