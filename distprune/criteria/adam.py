"""AdamSecondMoment: scores from what AdamW has collected already."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import local_tensor
from distprune.criteria.base import Criterion
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AdamSecondMoment(Criterion):
    """1/2 * w^2 * v, with v the second moment of the gradients that Adam keeps, bias-corrected.

    The saliency of Optimal Brain Damage, with Adam's ``exp_avg_sq / (1 - beta2^step)`` for the
    diagonal of the Hessian, as an empirical Fisher information. It needs no data and no
    ``update``: call ``scores()`` after some hundred steps. The unit is the *global batch* of a
    step (the square of the averaged gradient), which is smaller than the mean of the squares of
    single examples. ``amsgrad`` does not change it. The moments of parameters that were pruned
    decay, because their gradients are zero.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them; a tied parameter counts once.
        optimizer: ``torch.optim.Adam``, ``AdamW``, or any other whose state has "exp_avg_sq" and
            "step" for each parameter; also as ``accelerate`` wraps it.
        group: the ranks that take part; every rank by default.

    Raises:
        TypeError: no optimizer.

    ``scores()`` raises a ValueError on every rank, and names the parameter, if the optimizer has
    no such state for it: before its first step, for parameters of other tensors, or in optimizers
    that keep something else (SGD, Adafactor, 8-bit Adam).

    Source: LeCun et al., Optimal Brain Damage, NeurIPS 1989, equation 6; Kingma and Ba, Adam,
    arXiv 1412.6980, sections 2 and 5 (v approximates the diagonal of the Fisher information).

    Cost: no memory but that of the scores; no bytes on the wire but those of ``scores()``.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[nn.Module, str]],
        optimizer: torch.optim.Optimizer,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        # Wrappers of optimizers pass these two on.
        if not hasattr(optimizer, "state") or not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}; expected one like torch.optim.AdamW."
            )
        self._optimizer = optimizer
        super().__init__(parameters, group=group)

    def reset(self) -> None:
        super().reset()
        self.num_updates, self.total_weight = 1, 1.0  # the optimizer counts its steps

    def update(self, weight: float = 1.0) -> NoReturn:
        """Not available: the optimizer has seen the gradients."""
        raise NotImplementedError(
            "AdamSecondMoment has no unit to add: it reads the optimizer's state. Call scores()."
        )

    def _accumulate(
        self, position: int, shard: LocalShard, gradient: Tensor, weight: float
    ) -> NoReturn:
        raise AssertionError("update() is not available, and nothing else accumulates units")

    def _score(self, position: int, shard: LocalShard) -> Tensor:
        if not shard.values.numel():
            return torch.zeros_like(shard.values, dtype=torch.float32)
        parameter = self._tracked[position]
        managed = ShardReader().managed(parameter.module, parameter.name)
        tensor, span = (shard.parameter, None) if managed is None else managed.optimizer_tensor
        moment, step, beta = self._moment(shard.name, tensor)
        moment = local_tensor(moment).detach()
        if span is not None:
            moment = moment[span]
        if moment.shape != shard.values.shape:
            raise ValueError(
                f"{shard.name}: the optimizer's exp_avg_sq has shape {tuple(moment.shape)}, and "
                f"this rank's part of the parameter {tuple(shard.values.shape)}; expected the same."
            )
        score = torch.empty_like(shard.values, dtype=torch.float32).copy_(shard.values)
        return score.square_().mul_(moment.to(score.device)).mul_(0.5 / (1 - beta**step))

    def _moment(self, label: str, tensor: Tensor) -> tuple[Tensor, float, float]:
        """exp_avg_sq, the number of steps and beta2 of a parameter of the optimizer."""
        kind = type(getattr(self._optimizer, "optimizer", self._optimizer)).__name__
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        mine = [g for g in groups if any(other is tensor for other in g["params"])]
        if not mine:
            raise ValueError(
                f"{label} is none of the optimizer's parameters; expected the {kind} that trains "
                "it, made after the model was wrapped."
            )
        state: dict[str, Any] = self._optimizer.state.get(tensor, {})
        if (
            not {"exp_avg_sq", "step"} <= state.keys()
            or "betas" not in mine[0]
            or not state["step"]
        ):
            has = ", ".join(map(repr, state)) or "nothing"
            raise ValueError(
                f"{label}: the state of {kind} has {has}; expected 'exp_avg_sq' and 'step', as "
                "Adam and AdamW have after their first step on a parameter that has a gradient."
            )
        return state["exp_avg_sq"], float(state["step"]), float(mine[0]["betas"][1])
