"""Statistics of what a model is called with."""

from typing import TypeVar

from torch import nn

from distprune.statistics import ActivationStatistics

Statistics = TypeVar("Statistics", bound=ActivationStatistics)


def collected(statistics: Statistics, model: nn.Module, *batches: object) -> Statistics:
    """Let statistics see a model run on batches, and return them."""
    with statistics.collecting():
        for batch in batches:
            model(batch)
    return statistics
