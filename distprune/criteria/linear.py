"""Criteria that are linear in the gradient: the averaged one is enough, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from distprune._common.process_groups import world
from distprune.criteria.base import Criterion, is_finite
from distprune.methods.builtin import LowestScore
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NonFinite = Literal["refuse", "skip"]


class GlobalBatchCriterion(Criterion):
    """Base of criteria that read the averaged gradient of a global batch, ``.grad``.

    One call of ``update`` for each step: under gradient accumulation after the last backward, when
    ``.grad`` has the whole step. With a gradient scaler call it after
    ``scaler.unscale_(optimizer)`` (or pass ``weight=1 / scaler.get_scale()``), and before gradients
    are clipped: a factor that changes from step to step changes the sum. Where ranks have unequal
    numbers of tokens, weight the *loss* (on rank r ``loss * tokens_r * num_ranks / tokens``), and
    ``.grad`` is the mean over all tokens.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; a tied parameter counts once.
        group: the ranks that take part; every rank by default.
        non_finite: what to do with a gradient that is infinite or NaN, as gradient scalers produce
            them. "refuse": it makes ``scores()`` raise, on every rank. "skip": ``update`` leaves
            out the whole unit, on every rank, if any rank has such a value; it is collective then,
            and costs an all-reduce of 16 bytes and a pass over the gradients.

    Attributes:
        num_skipped: units that were left out.
    """

    ACCUMULATORS = ("sum",)

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        group: ProcessGroup | None = None,
        non_finite: NonFinite = "refuse",
    ) -> None:
        if non_finite not in ("refuse", "skip"):
            raise ValueError(f"non_finite={non_finite!r}; expected 'refuse' or 'skip'.")
        self._non_finite = non_finite
        super().__init__(parameters, group=group)

    def reset(self) -> None:
        super().reset()
        self.num_skipped = 0

    def update(self, weight: float = 1.0) -> None:
        if self._non_finite == "skip":
            with torch.inference_mode(False), torch.no_grad():
                communicator = world(self._group)
                count = communicator.max(communicator.run(self._count_non_finite))
            if int(count[0]):
                self.num_skipped += 1
                return
        super().update(weight)

    update.__doc__ = Criterion.update.__doc__

    def _count_non_finite(self) -> Tensor:
        reader = ShardReader()
        gradients = self._gradients(reader, self._read(reader))
        return torch.tensor([sum(not is_finite(each) for each in gradients)])

    def _plain_state(self) -> dict[str, Any]:
        return {**super()._plain_state(), "num_skipped": self.num_skipped}

    def _load_plain_state(self, state: Mapping[str, Any]) -> None:
        super()._load_plain_state(state)
        self.num_skipped = int(state["num_skipped"])


class GradientMagnitude(GlobalBatchCriterion):
    """|g|, where g is the weighted sum of the gradients of all updates.

    The score by which RigL grows connections: under ``prune.dense_gradients`` the highest among
    pruned elements are those whose return would change the loss most. (The absolute value of the
    mean, not the mean of absolute values of ranks.)

    Source: Evci et al., RigL, ICML 2020, arXiv 1911.11134, section 3, part (4).

    Cost: 4 bytes of memory per element; no bytes on the wire in ``update``.
    """

    def _accumulate(
        self, position: int, shard: LocalShard, gradient: Tensor, weight: float
    ) -> None:
        self._accumulator("sum", position, shard).add_(gradient, alpha=weight)

    def _score(self, position: int, shard: LocalShard) -> Tensor:
        return self._accumulator("sum", position, shard).abs()


class SNIP(GradientMagnitude):
    """Connection sensitivity: |w * g|, where g is the weighted sum of the gradients of all updates.

    The absolute value is taken once, at the end: with one update per batch, the score is that of
    one batch that holds them all. The weight is that of the moment when ``scores()`` is called.
    (The paper divides by the sum of all scores, which changes no ranking.) On a model that is
    pruned already, as in several rounds, gradients of pruned elements are zero unless they are
    collected in ``prune.dense_gradients``; pruned elements do not compete.

    Source: Lee et al., SNIP, ICLR 2019, arXiv 1810.02340, equations 5 and 6.

    Cost: 4 bytes of memory per element; no bytes on the wire in ``update``.
    """

    def _score(self, position: int, shard: LocalShard) -> Tensor:
        score = torch.mul(self._accumulator("sum", position, shard), shard.values)
        return score.float().abs_()


class Movement(GlobalBatchCriterion):
    """Movement: S = - sum over steps t of g_t * w_t. Signed; the lowest are pruned.

    Weights that move away from zero have high scores, whatever their size: gradient descent makes
    |w| larger where g and w have opposite signs. ``w_t`` is the weight with which the step's
    gradient was computed, so call ``update`` before the optimizer's step. ``weight`` is the factor
    of the step, such as its learning rate.

    On a model that is pruned already, collect gradients inside ``prune.dense_gradients``, as the
    paper does: otherwise the scores of pruned elements do not move. In a ``ScheduledPruner`` these
    never return. With ``global_mask(pairs, k, scores=..., signed=True)`` and ``set_masks``, masks
    are chosen anew among all elements, as in the paper.

    Source: Sanh et al., Movement pruning, NeurIPS 2020, arXiv 2005.07683, equation 3.

    Cost: 4 bytes of memory per element; no bytes on the wire in ``update``.
    """

    pruning_method = LowestScore

    def _accumulate(
        self, position: int, shard: LocalShard, gradient: Tensor, weight: float
    ) -> None:
        total = self._accumulator("sum", position, shard)
        total.addcmul_(gradient, shard.values, value=-weight)

    def _score(self, position: int, shard: LocalShard) -> Tensor:
        return self._accumulator("sum", position, shard).clone()
