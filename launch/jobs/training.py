"""What trainings have in common."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor


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
