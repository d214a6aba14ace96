"""Criteria that are linear in the gradient: the averaged one is enough, and nothing is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from distprune.criteria.base import Criterion
from distprune.shards.shard import LocalShard


class SNIP(Criterion):
    """Connection sensitivity: |w * g|, where g is the sum of the gradients of all updates.

    The absolute value is taken once, at the end: with one update per batch, the score is that of
    one batch that holds them all. The weight is that of the moment when ``scores()`` is called.
    (The paper divides by the sum of all scores, which changes no ranking.)

    Source: Lee et al., SNIP, ICLR 2019, arXiv 1810.02340, equations 5 and 6.

    Cost: 4 bytes of memory per element; no bytes on the wire in ``update``.
    """

    ACCUMULATORS = ("gradient",)

    def _accumulate(
        self, position: int, shard: LocalShard, gradient: Tensor, weight: float
    ) -> None:
        self._accumulator("gradient", position, shard).add_(gradient, alpha=weight)

    def _score(self, position: int, shard: LocalShard) -> Tensor:
        score = torch.mul(self._accumulator("gradient", position, shard), shard.values)
        return score.float().abs_()
