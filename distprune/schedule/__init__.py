"""When to prune, and how much: schedules of sparsity, and what a training loop drives.

pruner = schedule.ScheduledPruner(
    prune.select(model),
    schedule.Cubic(begin=0, end=1000, frequency=100, final_sparsity=0.8),
)
for batch in loader:
    ...
    optimizer.step()
    report = pruner.step()  # on every rank; None where nothing was pruned
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from distprune.base.schedules import Cubic, Function, Linear, OneShot, Schedule

if TYPE_CHECKING:
    from distprune.schedule.pruner import ScheduledPruner

__all__ = ["Cubic", "Function", "Linear", "OneShot", "Schedule", "ScheduledPruner"]


if not TYPE_CHECKING:  # a checker would take any name for one of this module

    def __getattr__(name: str) -> object:
        """Import ScheduledPruner on first use: schedules and recipes work without torch."""
        if name != "ScheduledPruner":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = importlib.import_module("distprune.schedule.pruner").ScheduledPruner
        globals()[name] = value
        return value
