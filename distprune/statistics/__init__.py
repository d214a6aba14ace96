"""Statistics of what layers are called with, on any sharding: for Wanda, RIA, STADE and OWL.

from distprune import statistics

collected = statistics.ActivationStatistics(prune.select(model))
with collected.collecting():
    for batch in calibration:
        model(**batch)
"""

from __future__ import annotations

from distprune.statistics.activation import ActivationStatistics, Totals, prune_sequentially
from distprune.statistics.gradients import GradientStatistics, GradientTotals
from distprune.statistics.gram import GramMatrices

__all__ = [
    "ActivationStatistics",
    "GradientStatistics",
    "GradientTotals",
    "GramMatrices",
    "Totals",
    "prune_sequentially",
]
