"""How a budget divides the pruned elements of a group among its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from distprune._common.amount import Bounds
from distprune._common.collectives import Communicator
from distprune.budgets import BudgetLike, to_budget
from distprune.budgets.base import Division, LinearDivision
from distprune.budgets.outliers import OWL, OWL_MULTIPLE, block_of, outlier_ratios
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import SelectionError
from distprune.files.recipe import FileRecipe
from distprune.files.selecting import bounded_of
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
    division = division_of(recipe, entries)
    assert isinstance(division, LinearDivision)
    lowest, highest = zip(*limits, strict=True)
    try:
        return division.divided(total, Bounds(lowest, highest)).counts
    except ValueError as error:
        raise SelectionError(str(error)) from error


def ratios_of(
    entries: Sequence[TensorEntry],
    scores: Sequence[Scored],
    num_numbers: Sequence[int],
    communicator: Communicator,
) -> Sequence[float]:
    """OWL's outlier ratios of tensors with so many numbers that are no NaN. Collective."""
    blocks = [block_of(entry.name) for entry in entries]
    return outlier_ratios(scores, num_numbers, blocks, OWL_MULTIPLE, communicator)


def division_of(
    recipe: FileRecipe, entries: Sequence[TensorEntry], ratios: Sequence[float] | None = None
) -> Division:
    """The budget of a recipe for some tensors; OWL by the outlier ratio of each."""
    if ratios is not None:
        names = [entry.name for entry in entries]
        return OWL(dict(zip(names, ratios, strict=True))).divide(bounded_of(entries))
    budget = to_budget(cast(BudgetLike, recipe.budget))
    assert budget is not None
    return budget.divide(bounded_of(entries))
