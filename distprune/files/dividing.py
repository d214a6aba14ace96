"""How a budget divides the pruned elements of a group among its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from distprune._common.amount import Bounds
from distprune.budgets import BudgetLike, to_budget
from distprune.budgets.base import Division, LinearDivision
from distprune.budgets.outliers import OWL, OWL_MULTIPLE, block_of, outlier_ratios
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import SelectionError
from distprune.files.recipe import FileRecipe
from distprune.files.selecting import bounded_of
from distprune.selection.candidates import Ranked
from distprune.selection.normalizing import Scored


def counts_of_shapes(
    recipe: FileRecipe,
    entries: Sequence[TensorEntry],
    limits: Sequence[tuple[int, int]],
    total: int,
) -> Sequence[int]:
    """How many elements each tensor loses by a budget that depends on shapes alone.

    Raises:
        SelectionError: the budget cannot divide the total.
    """
    division = _division_of(recipe, entries)
    assert isinstance(division, LinearDivision)
    lowest, highest = zip(*limits, strict=True)
    try:
        return division.divided(total, Bounds(lowest, highest)).counts
    except ValueError as error:
        raise SelectionError(str(error)) from error


def counts_of_scores(
    recipe: FileRecipe,
    entries: Sequence[TensorEntry],
    limits: Bounds,
    total: int,
    ranked: Ranked,
    outlier_scores: Sequence[Scored],
    num_numbers: Sequence[int],
) -> tuple[int, ...]:
    """How many elements each tensor loses by a budget that depends on what is stored. Collective.

    Args:
        recipe: of the group.
        entries: the tensors.
        limits: the fewest and most pruned elements of each.
        total: of the group.
        ranked: the group.
        outlier_scores: of which OWL counts the outliers; of other budgets, none.
        num_numbers: elements of each tensor that are no NaN.
    """
    ratios = None
    if outlier_scores:
        blocks = [block_of(entry.name) for entry in entries]
        found = outlier_ratios(
            outlier_scores, num_numbers, blocks, OWL_MULTIPLE, ranked.communicator
        )
        ratios = dict(zip([entry.name for entry in entries], found, strict=True))
    return _division_of(recipe, entries, ratios).counts(total, limits, ranked).counts


def _division_of(
    recipe: FileRecipe, entries: Sequence[TensorEntry], ratios: Mapping[str, float] | None = None
) -> Division:
    """The budget of a recipe for some tensors; OWL by the outlier ratio of each."""
    if ratios is not None:
        return OWL(ratios).divide(bounded_of(entries))
    budget = to_budget(cast(BudgetLike, recipe.budget))
    assert budget is not None
    return budget.divide(bounded_of(entries))
