"""Budgets: how the pruned elements of a call are divided among its parameters.

prune.global_unstructured(
    prune.select(model), prune.L1Unstructured, amount=0.5, budget="erk"
)

``budget=`` of ``global_unstructured`` and of ``ScheduledPruner`` takes one of these objects, or
"uniform", "erk", or a mapping from (module, name), or from full names, to
sparsities. The total stays what the amount says, exactly, over all parameters; each parameter loses
its own lowest elements. Counts are of all pruned elements after the call, so that a parameter that
is pruned further already, or that a floor or a ceiling holds, keeps that, and the others share the
rest by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from distprune.budgets.base import ERK, Budget, Sparsities, Uniform
from distprune.budgets.outliers import OWL

__all__ = ["ERK", "OWL", "Budget", "Sparsities", "Uniform"]

BudgetLike = Literal["uniform", "erk"] | Budget | Mapping[Any, float | Fraction]

_BY_NAME: dict[str, Callable[[], Budget]] = {"uniform": Uniform, "erk": ERK}


def to_budget(budget: BudgetLike | None) -> Budget | None:
    """The budget that an argument stands for; None without one.

    Raises:
        TypeError: neither a name, nor a budget, nor a mapping.
        ValueError: an unknown name.
    """
    if budget is None or isinstance(budget, Budget):
        return budget
    if isinstance(budget, Mapping):
        return Sparsities(budget)
    names = ", ".join(map(repr, _BY_NAME))
    if isinstance(budget, str):
        name: str = budget
        if name not in _BY_NAME:
            hint = " OWL needs outlier ratios: budgets.OWL(ratios)." if name == "owl" else ""
            raise ValueError(
                f"budget={name!r}; expected one of {names}, an object of distprune.budgets, or a "
                f"mapping to sparsities.{hint}"
            )
        return _BY_NAME[name]()
    raise TypeError(
        f"budget is {budget!r}; expected one of {names}, an object of distprune.budgets (made by a "
        "call, such as budgets.ERK()), or a mapping from (module, name) or full name to a sparsity."
    )
