"""The criteria that the script knows: what ranks the weights, and the text that it learns from."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from torch import nn

import distprune as prune
from distprune import criteria, language_models
from distprune.statistics import ActivationStatistics, GradientStatistics, GramMatrices
from jobs.processes import Job
from jobs.ranking import Pairs, Ranking, Scores, by_statistics

R = TypeVar("R")


class Calibration:
    """A dense model, and the text from which criteria learn.

    Args:
        windows: None if only criteria without text are asked for.
        statistics_file: read if it exists, else written when statistics are asked for; None: of a
            model that is another one later.
        gradients_file, grams_folder: the same for sums of squared gradients and Gram matrices.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Pairs,
        windows: language_models.TokenWindows | None,
        statistics_file: Path | None,
        batch_size: int,
        job: Job,
        gradients_file: Path | None = None,
        grams_folder: Path | None = None,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.windows = windows
        self.statistics_file = statistics_file
        self.batch_size = batch_size
        self.job = job
        self.gradients_file = gradients_file
        self.grams_folder = grams_folder

    @cached_property
    def statistics(self) -> ActivationStatistics:
        """Of the inputs of all layers. Collective when first asked for."""
        file = self.statistics_file
        if file is not None and self.job.of_rank_0(file.exists):
            return ActivationStatistics.load(file, self.parameters)
        statistics = ActivationStatistics(self.parameters)
        self.run(statistics)
        if file is not None:
            statistics.save(file)
        return statistics

    @property
    def text(self) -> language_models.TokenWindows:
        """The text from which criteria learn."""
        assert self.windows is not None  # the settings were checked
        return self.windows

    def scores_of_round(self, criterion: str) -> Scores:
        """Scores by a criterion of the model as it is now. Collective.

        Sums of squared gradients stay those of the dense model. In a pruned one what is pruned has
        no gradient, so that a row that lost much would seem to matter little: measured in
        tests/benchmarks/TRIED.md.
        """
        if criterion == "factored_fisher":
            return self.gradients.fisher()
        of_round = Calibration(
            self.model, self.parameters, self.windows, None, self.batch_size, self.job
        )
        scores = CRITERIA[criterion](of_round).scores
        assert scores is not None  # the settings were checked
        return scores

    @cached_property
    def grams(self) -> GramMatrices:
        """Of the inputs of all layers of the dense model. Collective when first asked for."""
        folder = self.grams_folder
        if folder is not None and self.job.of_rank_0((folder / "grams.json").exists):
            return GramMatrices.load(folder, self.parameters)
        grams = GramMatrices(self.parameters)
        self.run(grams)
        if folder is not None:
            grams.save(folder)
        return grams

    @cached_property
    def gradients(self) -> GradientStatistics:
        """Sums of squared gradients of the dense model. Collective when first asked for."""
        file = self.gradients_file
        if file is not None and self.job.of_rank_0(file.exists):
            return GradientStatistics.load(file, self.parameters)
        statistics = GradientStatistics(self.parameters)
        self.run(statistics)
        if file is not None:
            statistics.save(file)
        return statistics

    def run_block_by_block(
        self,
        statistics: ActivationStatistics,
        prune_block: Callable[[Pairs], R],
        finished: int = 0,
    ) -> list[R]:
        """Prune each decoder layer by the inputs that it has when those before it are pruned.

        Args:
            finished: the number of blocks that are done already.

        Returns:
            What `prune_block` returned for each other block.
        """
        return language_models.prune_block_by_block(
            self.model,
            self.windows,
            statistics,
            prune_block,
            batch_size=self.batch_size,
            progress=self.job.progress("pruning block by block"),
            finished=finished,
        )

    def run(
        self, collected: ActivationStatistics | GradientStatistics | criteria.Criterion
    ) -> None:
        """Run all windows through the model, and collect."""
        language_models.calibrate(
            self.model,
            self.windows,
            collected,
            batch_size=self.batch_size,
            progress=self.job.progress("calibrating"),
        )


def _elementwise(score: str) -> Callable[[Calibration], Ranking]:
    """By the gradient of each weight, as `distprune prune --text --score` ranks."""

    def rank(calibration: Calibration) -> Ranking:
        criterion = language_models.elementwise_criterion(score, calibration.parameters)
        calibration.run(criterion)
        return Ranking.by(criterion)

    return rank


# By name on the command line.
CRITERIA: dict[str, Callable[[Calibration], Ranking]] = {
    "magnitude": lambda _: Ranking(prune.L1Unstructured),
    "random": lambda _: Ranking(prune.RandomUnstructured),
    "wanda": by_statistics("wanda"),
    "ria": by_statistics("ria"),
    "stade": by_statistics("stade"),
    "taylor": _elementwise("taylor"),
    "fisher": _elementwise("elementwise_fisher"),
    # Without memory of the size of the model: by the sums of rows and of columns.
    "factored_fisher": lambda c: Ranking(prune.L1Unstructured, c.gradients.fisher()),
    # Of the inputs alone, as SparseGPT ranks.
    "obs": lambda c: Ranking(prune.L1Unstructured, c.grams.obs()),
}
NEEDS_TEXT = tuple(name for name in CRITERIA if name not in ("magnitude", "random"))


def method_of(criterion: str) -> type[prune.BasePruningMethod]:
    """The class that ranks by a criterion: none of these scores is signed."""
    return prune.RandomUnstructured if criterion == "random" else prune.L1Unstructured
