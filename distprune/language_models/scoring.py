"""Scores of a language model's weights by text, and pruning in rounds by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torch import nn

from distprune.api.chosen_masks import keep_pruned_values
from distprune.api.global_unstructured import global_unstructured
from distprune.base.naming import Pair
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.criteria.gradient_moment import Fisher, GradientMoment, Taylor
from distprune.language_models.calibrating import calibrate
from distprune.language_models.running import Report
from distprune.language_models.text import TokenWindows
from distprune.methods.builtin import L1Unstructured
from distprune.ranks.collectives import world
from distprune.reconstruction import ReconstructionReport, reconstruct
from distprune.shards.reader import Scores
from distprune.statistics.activation import ActivationStatistics
from distprune.statistics.gradients import GradientStatistics
from distprune.statistics.gram import GramMatrices

Collected = TypeVar("Collected", bound=ActivationStatistics | GradientStatistics | GradientMoment)

# Those of recipes that need text, and that of SparseGPT, which needs whole Gram matrices.
_FROM_GRADIENTS = ("taylor", "elementwise_fisher")
SCORES = ("wanda", "stade", "ria", "fisher", *_FROM_GRADIENTS, "obs")


def elementwise_criterion(score: str, parameters: Iterable[Pair]) -> GradientMoment:
    """What collects a score of each weight from gradients, by the name that recipes have for it.

    Args:
        score: "taylor": |w| times the mean |gradient| of single batches (of power 1, since that of
            power 2 ranks as Fisher does); "elementwise_fisher": w**2 times the mean of its square.
        parameters: (module, name) pairs.

    Raises:
        ValueError: as the criteria.
    """
    if score == "taylor":
        return Taylor(parameters, unit="rank_batch", power=1)
    return Fisher(parameters, unit="rank_batch")


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

    Attributes:
        statistics, gradients, grams: what was collected; collective when first asked for.

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
    ) -> None:
        self.model = model
        self.windows = windows
        self.parameters = list(parameters)
        self._options: Any = {"batch_size": batch_size, "progress": progress}

    def of(self, score: str) -> Scores:
        """The scores of all parameters by a name of a recipe, or "obs". Collective.

        Raises:
            ValueError: no such score, or none that needs text.
        """
        if score not in SCORES:
            raise ValueError(f"score={score!r}; expected one of {', '.join(SCORES)}.")
        if score in _FROM_GRADIENTS:
            return self._collected(elementwise_criterion(score, self.parameters)).scores()
        kind = {"fisher": "gradients", "obs": "grams"}.get(score, "statistics")
        found: Scores = getattr(getattr(self, kind), score)()
        return found

    def of_round(self, score: str) -> Scores:
        """The scores of the model as it is now, for ``prune_in_rounds``. Collective.

        For "fisher" the sums of squared gradients stay those of the dense model. In a pruned one
        what is pruned has no gradient, so that a row that lost much would seem to matter little:
        measured in tests/benchmarks/TRIED.md.
        """
        if score == "fisher":
            return self.of(score)
        return TextScores(self.model, self.windows, self.parameters, **self._options).of(score)

    @cached_property
    def statistics(self) -> ActivationStatistics:
        return self._collected(ActivationStatistics(self.parameters))

    @cached_property
    def gradients(self) -> GradientStatistics:
        return self._collected(GradientStatistics(self.parameters))

    @cached_property
    def grams(self) -> GramMatrices:
        return self._collected(GramMatrices(self.parameters))

    def _collected(self, empty: Collected) -> Collected:
        """Run the text."""
        if self.windows is None:
            raise ValueError("windows=None; expected text, from which the score is made.")
        calibrate(self.model, self.windows, empty, **self._options)
        return empty


class Round(NamedTuple):
    """What one round did; the same on every rank.

    Attributes:
        number: from 0 on.
        sparsity: over all parameters, as it was asked for.
        pruning: of this round.
        update: of the kept weights after it; None without.
    """

    number: int
    sparsity: float
    pruning: PruningReport
    update: ReconstructionReport | None


def prune_in_rounds(
    model: nn.Module,
    windows: TokenWindows,
    parameters: Iterable[Pair],
    sparsities: Sequence[float],
    score: Callable[[], Scores],
    *,
    update: bool = True,
    damping: float = 0.01,
    batch_size: int = 1,
    progress: Report | None = None,
    finished: int = 0,
) -> Iterator[Round]:
    """Prune globally in rounds, and after each move the kept weights. Collective.

    def score():
        taylor = criteria.Taylor(parameters, unit="rank_batch", power=1)
        calibrate(model, windows, taylor)
        return taylor.scores()

    for made in prune_in_rounds(model, windows, parameters, [0.35, 0.5, 0.6], score):
        print(made.pruning.sparsity)  # checkpoint.save here lets a stopped run go on

    With scores by factors nothing is computed anew, and no round has a backward: sums of gradients
    of the dense model (``GradientStatistics``) rank the weights as they are in each round,
    ``score=statistics.fisher``. Of a language model this gave the best result (docs, Moving the
    kept weights).

    In each round: scores and Gram matrices of the model as it is now; then the lowest scores over
    all parameters, until the sparsity is reached; then :func:`distprune.reconstruct`. What was
    pruned stays pruned. A round runs when the next item is asked for; every rank asks for it.

    Args:
        model: plain or wrapped.
        windows: the calibration data, the same on every rank.
        parameters: (module, name) pairs, as ``select`` lists them.
        sparsities: of all parameters together after each round; rising, between 0 and 1.
        score: computes importance scores of the present model; collective.
        update: move the kept weights after each pruning.
        damping: as for ``reconstruct``.
        batch_size, progress: as for :func:`calibrate`, for the Gram matrices.
        finished: rounds that are done already: the model has their masks and weights.

    Raises:
        ValueError: sparsities that do not rise between 0 and 1, or below the present one.
        Exception: as ``global_unstructured``, :func:`calibrate` and ``reconstruct``, on every
            rank. Rounds before stay.

    Cost: per round that of the scores, one forward of each window, and that of ``reconstruct``.
    """
    pairs, communicator = list(parameters), world()

    def check() -> None:
        steps = [0.0, *sparsities]
        if not sparsities or steps != sorted(set(steps)) or steps[-1] >= 1:
            raise ValueError(
                f"sparsities={list(sparsities)!r}; expected rising ones between 0 and 1, such as "
                "[0.35, 0.5, 0.6]."
            )

    communicator.run(check, lambda _: [("sparsities", f"{list(sparsities)!r}, {finished!r}")])
    arguments = ParameterArguments(parameters=pairs)
    for number, sparsity in list(enumerate(sparsities))[finished:]:
        entries = count_live(lambda: arguments, communicator).entries()
        total = sum(entry.num_elements for entry in entries)
        num_pruned = sum(entry.num_pruned for entry in entries)
        amount = round(sparsity * total) - num_pruned
        if amount < 0:
            raise ValueError(
                f"sparsities[{number}]={sparsity!r}, and {num_pruned / total:.2%} are pruned "
                "already; expected more."
            )
        scores, moved = score(), None
        if update:
            grams = GramMatrices(pairs, allow_empty="*")
            calibrate(model, windows, grams, batch_size=batch_size, progress=progress)
        with keep_pruned_values():
            pruning = global_unstructured(pairs, L1Unstructured, scores, amount=amount)
            if update:
                moved = reconstruct(pairs, grams, damping=damping)
        yield Round(number, sparsity, pruning, moved)
