"""What trainings have in common."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn


def adamw(
    model: nn.Module, learning_rate: float, *, beta2: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW of what is trained, one parameter at a time.

    Its form for lists of parameters refuses the mix of sharded and plain ones that tensor
    parallelism leaves.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=learning_rate, betas=(0.9, beta2), weight_decay=weight_decay, foreach=False
    )


def relative_rate(step: int, steps: int) -> float:
    """A learning rate, of its highest: it rises over a tenth of the steps, then falls to a tenth.

    Args:
        step: counted from 1.
        steps: of the whole training.
    """
    warm_up = max(1, steps // 10)
    if step <= warm_up:
        return step / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def mean_over_ranks(value: Tensor) -> float:
    """The mean of one number per rank, on every rank. Collective."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
