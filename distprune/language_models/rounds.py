"""Pruning in rounds: each prunes some more, by scores of the model that the rounds before left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from distprune.api.global_unstructured import global_unstructured
from distprune.api.zeros import keep_pruned_values
from distprune.base.naming import Pair
from distprune.call.report import PruningReport
from distprune.call.request import ParameterArguments
from distprune.call.run import count_live
from distprune.language_models.calibrating import calibrate
from distprune.language_models.running import Report
from distprune.language_models.text import TokenWindows
from distprune.methods.builtin import L1Unstructured
from distprune.ranks.process_groups import world
from distprune.reconstruction.reconstructing import ReconstructionReport, reconstruct
from distprune.shards.parameters import Scores
from distprune.statistics.gram import GramMatrices


@dataclass(frozen=True)
class Round:
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
    pairs = list(parameters)
    communicator = world()

    def check() -> None:
        steps = [0.0, *sparsities]
        if not sparsities or steps != sorted(set(steps)) or steps[-1] >= 1:
            raise ValueError(
                f"sparsities={list(sparsities)!r}; expected rising ones between 0 and 1, such as "
                "[0.35, 0.5, 0.6]."
            )

    facts = [("sparsities", repr(list(sparsities))), ("finished", repr(finished))]
    with communicator.exclusively():
        communicator.run(check, lambda _: facts)
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
        scores = score()
        grams = GramMatrices(pairs, allow_empty="*") if update else None
        if grams is not None:
            calibrate(model, windows, grams, batch_size=batch_size, progress=progress)
        with keep_pruned_values():
            pruning = global_unstructured(pairs, L1Unstructured, scores, amount=amount)
            moved = None if grams is None else reconstruct(pairs, grams, damping=damping)
        yield Round(number, sparsity, pruning, moved)
