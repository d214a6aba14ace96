"""When to prune, and how much: schedules of sparsity, and what a training loop drives.

pruner = schedule.ScheduledPruner(
    prune.select(model, exclude="lm_head"),
    schedule.Cubic(begin=0, end=1000, frequency=100, final_sparsity=0.8),
)
for batch in loader:
    ...
    optimizer.step()
    report = pruner.step()  # on every rank; None where nothing was pruned
"""

from distprune.schedule.functions import Cubic, Function, Linear, OneShot, Schedule
from distprune.schedule.pruner import ScheduledPruner

__all__ = ["Cubic", "Function", "Linear", "OneShot", "Schedule", "ScheduledPruner"]
