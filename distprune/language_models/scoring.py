"""Scores of a language model's weights by text, under the names that they have in recipes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from distprune.base.naming import Pair
from distprune.criteria.gradient_moment import Fisher, GradientMoment, Taylor
from distprune.language_models.calibrating import calibrate
from distprune.language_models.running import Report
from distprune.language_models.text import TokenWindows
from distprune.ranks.process_groups import world
from distprune.shards.parameters import Scores
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.gradients import GradientStatistics
from distprune.statistics.gram import GramMatrices

Collected = TypeVar("Collected", ActivationStatistics, GradientStatistics)

# Those of recipes that need text, and that of SparseGPT, which needs whole Gram matrices.
_ELEMENTWISE = ("taylor", "elementwise_fisher")
SCORES = ("wanda", "stade", "ria", "fisher", *_ELEMENTWISE, "obs")


def elementwise_criterion(score: str, parameters: Iterable[Pair]) -> GradientMoment:
    """What collects a score of each weight from gradients, by the name that recipes have for it.

    Args:
        score: "taylor": |w| times the mean |gradient| of single batches (of power 1, since that of
            power 2 ranks as Fisher does); "elementwise_fisher": w**2 times the mean of its square.
        parameters: (module, name) pairs.

    Raises:
        ValueError: no such score; as the criteria.
    """
    if score == "taylor":
        return Taylor(parameters, unit="rank_batch", power=1)
    if score == "elementwise_fisher":
        return Fisher(parameters, unit="rank_batch")
    raise ValueError(f"score={score!r}; expected 'taylor' or 'elementwise_fisher'.")


class TextScores:
    """Scores of a model in memory by text, under the names that recipes have. Collective.

    scores = TextScores(model, windows, parameters)
    prune.global_unstructured(
        parameters, prune.L1Unstructured, scores.of("fisher"), amount=0.6
    )

    What several scores need is collected once: statistics of activations for "wanda", "stade" and
    "ria", of gradients for "fisher", Gram matrices for "obs". "taylor" and "elementwise_fisher" are
    collected each time.

    Args:
        model: plain or wrapped.
        windows: of text, the same on every rank; None, if statistics are all that is asked for.
        parameters: (module, name) pairs.
        batch_size, progress: as for ``calibrate``.
        statistics: a file of statistics of activations, which is read if it exists, else written.
        gradients: the same for those of gradients.

    Raises: as ``calibrate``, and as what is collected.

    Cost: that of ``calibrate`` for each thing that is collected.
    """

    def __init__(
        self,
        model: nn.Module,
        windows: TokenWindows | None,
        parameters: Iterable[Pair],
        *,
        batch_size: int = 1,
        progress: Report | None = None,
        statistics: str | Path | None = None,
        gradients: str | Path | None = None,
    ) -> None:
        self.model = model
        self.windows = windows
        self.parameters = list(parameters)
        self._batch_size = batch_size
        self._progress = progress
        self._files = {"statistics": statistics, "gradients": gradients}

    def of(self, score: str) -> Scores:
        """The scores of all parameters by a name of a recipe, or "obs". Collective.

        Raises:
            ValueError: no such score, or none that needs text.
        """
        if score not in SCORES:
            raise ValueError(f"score={score!r}; expected one of {', '.join(SCORES)}.")
        if score not in _ELEMENTWISE:
            name = {"fisher": "gradients", "obs": "grams"}.get(score, "statistics")
            found: Scores = getattr(getattr(self, name), score)()
            return found
        criterion = elementwise_criterion(score, self.parameters)
        self._calibrate(criterion)
        return criterion.scores()

    def of_round(self, score: str) -> Scores:
        """The scores of the model as it is now, for ``prune_in_rounds``. Collective.

        For "fisher" the sums of squared gradients stay those of the dense model. In a pruned one
        what is pruned has no gradient, so that a row that lost much would seem to matter little:
        measured in tests/benchmarks/TRIED.md.
        """
        if score == "fisher":
            return self.of(score)
        now = TextScores(
            self.model,
            self.windows,
            self.parameters,
            batch_size=self._batch_size,
            progress=self._progress,
        )
        return now.of(score)

    @cached_property
    def statistics(self) -> ActivationStatistics:
        """Of the inputs of all layers. Collective when first asked for."""
        return self._stored("statistics", ActivationStatistics)

    @cached_property
    def gradients(self) -> GradientStatistics:
        """Sums of squared gradients. Collective when first asked for."""
        return self._stored("gradients", GradientStatistics)

    @cached_property
    def grams(self) -> GramMatrices:
        """Of the inputs of all layers. Collective when first asked for."""
        collected = GramMatrices(self.parameters)
        self._calibrate(collected)
        return collected

    def _stored(self, name: str, kind: type[Collected]) -> Collected:
        path = self._files[name]

        def exists() -> torch.Tensor:
            return torch.tensor([int(path is not None and Path(path).exists())])

        if path is not None and world().leader_of(1, exists)[0]:
            return kind.load(path, self.parameters)
        collected = kind(self.parameters)
        self._calibrate(collected)
        if path is not None:
            collected.save(path)
        return collected

    def _calibrate(
        self, collected: ActivationStatistics | GradientStatistics | GradientMoment
    ) -> None:
        if self.windows is None:
            raise ValueError("windows=None; expected text, from which the score is made.")
        calibrate(
            self.model,
            self.windows,
            collected,
            batch_size=self._batch_size,
            progress=self._progress,
        )
