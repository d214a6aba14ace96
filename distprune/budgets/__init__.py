"""Budgets: how the pruned elements of a call are divided among its parameters.

prune.global_unstructured(
    prune.select(model), prune.L1Unstructured, amount=0.5, budget="lamp"
)

``budget=`` of ``global_unstructured`` and of ``ScheduledPruner`` takes one of these objects, or
"uniform", "uniform+", "erk", "lamp", or a mapping from (module, name), or from full names, to
sparsities. The total stays what the amount says, exactly, over all parameters; each parameter loses
its own lowest elements. Counts are of all pruned elements after the call, so that a parameter that
is pruned further already, or that a floor or a ceiling holds, keeps that, and the others share the
rest by the same rule.
"""

from distprune.budgets.base import Budget
from distprune.budgets.lamp import LAMP
from distprune.budgets.mapping import Sparsities
from distprune.budgets.outliers import OWL
from distprune.budgets.shapes import ERK, Uniform, UniformPlus

__all__ = ["ERK", "LAMP", "OWL", "Budget", "Sparsities", "Uniform", "UniformPlus"]
