"""Criteria that are not linear in the gradient: Fisher and Taylor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from distprune.criteria.base import Unit
from distprune.criteria.gradient_moment import GradientMoment
from distprune.criteria.rank_batch import Power

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Fisher(GradientMoment):
    """Empirical Fisher, or Optimal Brain Damage: 1/2 * w^2 * E[g^2].

    The increase of the loss that removing a weight causes, by a diagonal quadratic model of it
    with the empirical Fisher information in place of the Hessian.

    Args:
        parameters, unit, group: see :class:`GradientMoment`. What is published is the mean over
            samples: ``unit="rank_batch"`` with micro-batches of one sample. The gradient of a
            larger batch is a mean itself, in which the noise of single samples is less.

    Source: LeCun et al., Optimal Brain Damage, NeurIPS 1989; Theis et al., arXiv 1801.05787,
    equation 7 (Fisher); Singh and Alistarh, WoodFisher, arXiv 2004.14340, section 4.

    Cost: see :meth:`GradientMoment.calibrating`; with ``unit="global_batch"`` 4 bytes of memory per
    element, and no bytes on the wire.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        unit: Unit,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, unit=unit, group=group)
        self._factor = 0.5


class Taylor(GradientMoment):
    """First-order Taylor expansion of the loss: w^2 * E[g^2], or |w| * E[|g|].

    Args:
        parameters, unit, group: see :class:`GradientMoment`.
        power: 2, the squared change of the loss, or 1, its absolute value.

    Source: Molchanov et al., arXiv 1906.10771, equation 8 (power 2), and arXiv 1611.06440,
    section 2.2 (power 1), each for single weights.

    Cost: as :class:`Fisher`.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        *,
        unit: Unit,
        power: Power = 2,
        group: ProcessGroup | None = None,
    ) -> None:
        if power not in (1, 2):
            raise ValueError(f"power={power!r}; expected 1 or 2.")
        super().__init__(parameters, unit=unit, group=group)
        self._power = power
