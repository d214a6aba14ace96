"""The counts that a budget gives the tensors of a group: the rules of live models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from distprune._common.amount import Bounded, Bounds
from distprune.files.errors import SelectionError
from distprune.files.formats.header import TensorEntry
from distprune.files.recipe import FileRecipe

if TYPE_CHECKING:  # torch comes with it
    from distprune.budgets.base import Division
    from distprune.budgets.given import BudgetLike


def bounded_of(entries: Sequence[TensorEntry]) -> list[Bounded]:
    """The tensors, as bounds and budgets take them."""
    return [Bounded(e.name, (e.name,), e.numel, tuple(e.shape)) for e in entries]


def division_of(
    recipe: FileRecipe, entries: Sequence[TensorEntry], ratios: Mapping[str, float] | None = None
) -> Division:
    """The budget of a recipe for some tensors.

    Args:
        recipe: of a group; it has a budget.
        entries: of the group.
        ratios: of the outliers of each tensor, by name, for OWL.
    """
    from distprune.budgets.given import to_budget
    from distprune.budgets.outliers import OWL

    if ratios is not None:
        return OWL(ratios).divide(bounded_of(entries))
    budget = to_budget(cast("BudgetLike", recipe.budget))
    assert budget is not None
    return budget.divide(bounded_of(entries))


def counts_of_shapes(
    recipe: FileRecipe,
    entries: Sequence[TensorEntry],
    limits: Sequence[tuple[int, int]],
    total: int,
) -> list[int] | None:
    """How many elements each tensor loses; None if that depends on what is stored.

    Raises:
        SelectionError: the budget cannot divide the total.
    """
    if recipe.budget not in ("uniform", "uniform+", "erk"):
        return None
    from distprune.budgets.base import LinearDivision

    division = division_of(recipe, entries)
    assert isinstance(division, LinearDivision)
    lowest, highest = zip(*limits, strict=True)
    try:
        return list(division.divided(total, Bounds(lowest, highest)).counts)
    except ValueError as error:
        raise SelectionError(str(error)) from error
