"""Custom: a criterion from a user's own function of weight, gradient and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distprune.criteria.base import Unit, checked_unit
from distprune.criteria.linear import GlobalBatchCriterion, NonFinite
from distprune.methods.builtin import L1Unstructured, LowestScore
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CHUNK = 1 << 18  # elements

Update = Callable[[Tensor, Tensor, Tensor], Tensor]
Finish = Callable[[Tensor, Tensor], Tensor]


class Custom(GlobalBatchCriterion):
    """Scores from a function of your own: state = update(weight, gradient, state), elementwise.

        # An exponential average of |w * g|:
        criteria.Custom(pairs, lambda w, g, s: 0.9 * s + 0.1 * (w * g).abs(), unit="global_batch")

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; a tied parameter counts once.
        update: called at each ``criterion.update(weight=...)`` with 1-d chunks of equal length:
            the weights, their gradients times the weight of the unit, and the state (fp32, zeros
            at first). Returns the new state, and changes none of the three in place. Each element
            on its own: chunks are cut anywhere.
        unit: what a gradient is of. "global_batch" is the averaged gradient. Functions that are
            not linear in it, such as |g| or g^2, give something else for each rank's batch, which
            this class does not see: "rank_batch" raises NotImplementedError.
        score: makes the scores of weights and state; None: the scores are the state.
        signed: False: scores are ranked by |score|. True: the lowest, signed, are pruned.
        group: the ranks that take part; every rank by default.
        non_finite: "refuse" or "skip": see :class:`GlobalBatchCriterion`.

    If ``update`` raises, no state has changed: all new ones are computed before any is kept.

    Cost: 4 bytes of memory per element, twice as many inside ``criterion.update``, and what
    ``update`` takes for a chunk of 262,144 elements; no bytes on the wire in ``update``.
    """

    ACCUMULATORS = ("state",)

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        update: Update,
        *,
        unit: Unit,
        score: Finish | None = None,
        signed: bool = False,
        group: ProcessGroup | None = None,
        non_finite: NonFinite = "refuse",
    ) -> None:
        for label, function in (("update", update), ("score", score)):
            if not callable(function) and (label == "update" or function is not None):
                raise TypeError(
                    f"{label} is a {type(function).__name__}; expected a function of tensors."
                )
        if checked_unit(unit) == "rank_batch":
            raise NotImplementedError(
                "Custom reads averaged gradients only; expected unit='global_batch'. Fisher and "
                "Taylor have unit='rank_batch'."
            )
        self.pruning_method = LowestScore if signed else L1Unstructured  # type: ignore[misc]
        self._update, self._finish = update, score
        super().__init__(parameters, group=group, non_finite=non_finite)

    def _prepared(
        self, shards: list[LocalShard], gradients: list[Tensor], weight: float
    ) -> list[Tensor]:
        """The new states: the caller's function may raise."""
        gradients = super()._prepared(shards, gradients, weight)
        states = []
        for position, (shard, gradient) in enumerate(zip(shards, gradients, strict=True)):
            state = self._accumulator("state", position, shard).clone()
            flat, values = shard.flat(state), shard.flat(shard.values)
            gradient = shard.flat(gradient)
            for start in range(0, len(flat), _CHUNK):
                chunk = slice(start, start + _CHUNK)
                mine = gradient[chunk] if weight == 1.0 else gradient[chunk] * weight
                new = self._update(values[chunk], mine, flat[chunk].clone())
                flat[chunk] = _checked(new, flat[chunk], shard.name, "update")
            states.append(state)
        return states

    def _accumulate(
        self, position: int, shard: LocalShard, gradient: Tensor, weight: float
    ) -> None:
        self._accumulator("state", position, shard).copy_(gradient)

    def _score(self, position: int, shard: LocalShard) -> Tensor:
        state = self._accumulator("state", position, shard)
        if self._finish is None:
            return state.clone()
        score = torch.empty_like(state)
        flat_state, flat_score = shard.flat(state), shard.flat(score)
        values = shard.flat(shard.values)
        for start in range(0, len(flat_state), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            new = self._finish(values[chunk], flat_state[chunk].clone())
            flat_score[chunk] = _checked(new, flat_state[chunk], shard.name, "score")
        return score


def _checked(result: object, like: Tensor, label: str, what: str) -> Tensor:
    if isinstance(result, Tensor) and result.shape == like.shape and not result.is_complex():
        return result
    shown = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise ValueError(
        f"{label}: {what} returned {shown} for chunks of shape {tuple(like.shape)}; expected a "
        "real tensor of that shape, because it has to work on each element alone."
    )
