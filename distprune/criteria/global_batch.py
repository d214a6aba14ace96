"""Criteria of the averaged gradient of a global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from distprune.criteria.base import Criterion, NonFinite, Unit
from distprune.criteria.parts import Part
from distprune.methods.builtin import L1Unstructured, LowestScore

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GradientMagnitude(Criterion):
    """|g|, where g is the weighted sum of the gradients of all updates.

    The score by which RigL grows connections: under ``prune.dense_gradients`` the highest among
    pruned elements are those whose return would change the loss most. (The absolute value of the
    mean, not the mean of absolute values of ranks.)

    Source: Evci et al., RigL, ICML 2020, arXiv 1911.11134, section 3, part (4).

    Cost: 4 bytes of memory per element; no bytes on the wire in ``update``.
    """

    def _accumulate(self, part: Part, gradient: Tensor, factor: float) -> None:
        part.total.add_(gradient, alpha=factor)

    def _score(self, part: Part) -> Tensor:
        return part.total.abs()


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

    def _score(self, part: Part) -> Tensor:
        score = torch.mul(part.total, part.shard.values)
        return score.float().abs_()


class Movement(Criterion):
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

    def _accumulate(self, part: Part, gradient: Tensor, factor: float) -> None:
        part.total.addcmul_(gradient, part.shard.values, value=-factor)


Update = Callable[[Tensor, Tensor, Tensor], Tensor]
Finish = Callable[[Tensor, Tensor], Tensor]


class Custom(Criterion):
    """Scores from a function of your own: state = update(weight, gradient, state), elementwise.

        # An exponential average of |w * g|:
        criteria.Custom(pairs, lambda w, g, s: 0.9 * s + 0.1 * (w * g).abs(), unit="global_batch")

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; a tied parameter counts once.
        update: called at each ``criterion.update(weight=...)`` with this rank's part of each
            parameter, three tensors of one shape: the weights, their gradients times the weight
            of the unit, and the state (fp32, zeros at first). Returns the new state, and changes
            none of the three in place. Each element on its own: parts are cut anywhere.
        unit: what a gradient is of. "global_batch" is the averaged gradient. Functions that are
            not linear in it, such as |g| or g^2, give something else for each rank's batch, which
            this class does not see: "rank_batch" raises NotImplementedError.
        score: makes the scores of weights and state; None: the scores are the state.
        signed: False: scores are ranked by |score|. True: the lowest, signed, are pruned.
        group: the ranks that take part; every rank by default.
        non_finite: "refuse" or "skip": see :class:`Criterion`.

    If ``update`` raises, no state has changed: all new ones are computed before any is kept.

    Cost: 4 bytes of memory per element, twice as many inside ``criterion.update``, and what
    ``update`` takes for a parameter; no bytes on the wire in ``update``.
    """

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
        if unit != "global_batch":
            raise NotImplementedError(
                f"unit={unit!r}: Custom reads averaged gradients only; expected "
                "unit='global_batch'. Fisher and Taylor have unit='rank_batch'."
            )
        self.pruning_method = LowestScore if signed else L1Unstructured  # type: ignore[misc]
        self._update, self._finish = update, score
        super().__init__(parameters, group=group, non_finite=non_finite)

    def _prepared(
        self, parts: Sequence[Part], gradients: list[Tensor], weight: float
    ) -> list[Tensor]:
        """The new states: the caller's function may raise."""

        def update(w: Tensor, g: Tensor, state: Tensor) -> Tensor:
            return self._update(w, g if weight == 1.0 else g * weight, state)

        return [
            self._applied(update, "update", part, gradient)
            for part, gradient in zip(parts, gradients, strict=True)
        ]

    def _accumulate(self, part: Part, gradient: Tensor, factor: float) -> None:
        part.total.copy_(gradient)

    def _score(self, part: Part) -> Tensor:
        if self._finish is None:
            return super()._score(part)
        return self._applied(self._finish, "score", part)

    def _applied(
        self, function: Callable[..., object], what: str, part: Part, *gradients: Tensor
    ) -> Tensor:
        """What a function makes of the weights, of gradients if given, and of the state: fp32."""
        state = part.total
        new = function(part.shard.values, *gradients, state.clone())
        if not isinstance(new, Tensor) or new.shape != state.shape or new.is_complex():
            shown = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
            raise ValueError(
                f"{part.label}: {what} returned {shown} for weights of shape "
                f"{tuple(state.shape)}; expected a real tensor of that shape, because it has to "
                "work on each element alone."
            )
        return torch.empty_like(state).copy_(new)
