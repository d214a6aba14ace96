"""The criteria that a comparison knows: each scores every weight, from training text only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from torch import nn

import distprune as prune
from distprune import criteria
from distprune.statistics import ActivationStatistics
from jobs.ranking import Pairs, Ranking, by_statistics

from .data import batches
from .training import Trainer, language_loss

CALIBRATION_SEED = 1_000  # added to --seed, so that no training has these batches


@dataclass(frozen=True, slots=True)
class TrainingScores:
    """Criteria that learn from the training itself, and need no calibration."""

    parameters: Pairs
    movement: criteria.Movement

    @classmethod
    def of(cls, parameters: Pairs) -> TrainingScores:
        return cls(parameters, criteria.Movement(parameters))


class Calibration:
    """A trained model, and what criteria may learn from.

    Attributes:
        training: what was collected while the model was trained.
        batches: this rank's part of each calibration batch, int64 [part, WINDOW].
    """

    def __init__(
        self,
        model: nn.Module,
        training: TrainingScores,
        trainer: Trainer,
        num_batches: int,
        seed: int,
    ) -> None:
        self.model = model
        self.parameters = training.parameters
        self.training = training
        parts = batches(
            trainer.corpus.train,
            num_batches,
            seed + CALIBRATION_SEED,
            shard=trainer.shard,
            num_shards=trainer.num_shards,
        )
        self.batches = [part.to(trainer.job.device) for part in parts]

    @cached_property
    def statistics(self) -> ActivationStatistics:
        """Of the inputs of all layers, for the criteria that need them. Collective at first."""
        statistics = ActivationStatistics(self.parameters)
        with statistics.collecting():
            for batch in self.batches:
                self.model(input_ids=batch, use_cache=False)
        return statistics


def _snip(calibration: Calibration) -> Ranking:
    criterion = criteria.SNIP(calibration.parameters)
    for batch in calibration.batches:
        with criterion.batch():
            language_loss(calibration.model, batch).backward()
        calibration.model.zero_grad()
    return Ranking.by(criterion)


def _by_sequences(
    make: Callable[..., criteria.Criterion],
) -> Callable[[Calibration], Ranking]:
    """A criterion whose unit is one sequence: the same on any number of ranks."""

    def rank(calibration: Calibration) -> Ranking:
        criterion = make(calibration.parameters, unit="rank_batch")
        with criterion.calibrating():
            for batch in calibration.batches:
                for sequence in batch.split(1):
                    with criterion.batch():
                        language_loss(calibration.model, sequence).backward()
                    calibration.model.zero_grad()
        return Ranking.by(criterion)

    return rank


# By name on the command line.
CRITERIA: dict[str, Callable[[Calibration], Ranking]] = {
    "random": lambda _: Ranking(prune.RandomUnstructured),
    "magnitude": lambda _: Ranking(prune.L1Unstructured),
    "snip": _snip,
    # Of power 1: that of power 2 ranks as Fisher does.
    "taylor": _by_sequences(partial(criteria.Taylor, power=1)),
    "fisher": _by_sequences(criteria.Fisher),
    "movement": lambda calibration: Ranking.by(calibration.training.movement),
    "wanda": by_statistics("wanda"),
    "ria": by_statistics("ria"),
    "stade": by_statistics("stade"),
}
