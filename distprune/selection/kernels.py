"""The choice of the code that touches every element: numpy's on a CPU, torch's elsewhere."""

from __future__ import annotations

from types import ModuleType

import torch

from distprune._common import memory
from distprune.selection import cpu, device


def kernels_on(where: torch.device) -> ModuleType:
    """The functions for chunks on a device; both modules have the same."""
    return cpu if memory.takes_numpy(where) else device
