"""Scores whose sign counts, and the check that whoever ranks them knows it."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from distprune.shards.factored import FactoredScores

S = TypeVar("S", Tensor, FactoredScores, Tensor | FactoredScores)


class SignedScores(dict[tuple[nn.Module, str], S]):
    """Importance scores of which the lowest, signed, are to be pruned: -2 before -1 before 1.

    A criterion with signed scores returns them. A method that ranks by |score| would prune those
    next to zero, which are neither the best nor the worst, so it is refused.
    """


def check_order(scores: object, method: object) -> None:
    """Refuse signed scores for a method that ranks by their absolute values.

    Raises:
        TypeError: says which method to take.
    """
    if isinstance(scores, SignedScores) and getattr(method, "IGNORES_SIGN", False):
        raise TypeError(
            f"{type(method).__name__} ranks |score|, and these importance_scores are signed: the "
            "lowest are to be pruned, and negative ones first. Expected "
            "pruning_method=prune.LowestScore, which is criterion.pruning_method."
        )


def check_signed(scores: object, is_signed: bool) -> None:
    """Refuse signed scores where they would be ranked by their absolute values.

    Raises:
        TypeError: says which argument to pass.
    """
    if isinstance(scores, SignedScores) and not is_signed:
        raise TypeError(
            "scores are those of a signed criterion, and signed=False ranks |score|; expected "
            "signed=True."
        )
