"""The argument ``budget=``: from what a caller may write to a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from distprune.budgets.base import Budget
from distprune.budgets.lamp import LAMP
from distprune.budgets.mapping import Sparsities
from distprune.budgets.shapes import ERK, Uniform, UniformPlus

BudgetLike = Literal["uniform", "uniform+", "erk", "lamp"] | Budget | Mapping[Any, float | Fraction]

_BY_NAME: dict[str, Callable[[], Budget]] = {
    "uniform": Uniform,
    "uniform+": UniformPlus,
    "erk": ERK,
    "lamp": LAMP,
}


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
