"""What a job passes to `global_unstructured`, by the name of a criterion."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import distprune as prune
from distprune import criteria

Pairs = list[prune.NamedParameter]
Scores = Mapping[tuple[nn.Module, str], Tensor | prune.FactoredScores]


@dataclass(frozen=True, slots=True)
class Ranking:
    """A method, and its scores; the weights themselves rank where scores are None."""

    method: type[prune.BasePruningMethod]
    scores: Scores | None = None

    @classmethod
    def by(cls, criterion: criteria.Criterion) -> Ranking:
        return cls(criterion.pruning_method, criterion.scores())


def by_statistics(score: str) -> Callable[[Any], Ranking]:
    """Ranks by a score of activation statistics: "wanda", "ria" or "stade".

    Returns:
        A function of a calibration, which has the statistics as `statistics`.
    """

    def rank(calibration: Any) -> Ranking:
        return Ranking(prune.L1Unstructured, getattr(calibration.statistics, score)())

    return rank
