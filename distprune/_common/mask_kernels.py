"""The kernels that read many masks in one launch, where a device has them."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from distprune._common.triton_use import checked_on, is_possible_on


def mask_kernels_on(where: torch.device) -> ModuleType | None:
    """triton_masks.py, where its kernels are used on a device; see :func:`checked_on`."""
    return _compiled_on(where) if is_possible_on(where) else None


@functools.cache
def _compiled_on(where: torch.device) -> ModuleType | None:
    def load() -> ModuleType:
        from distprune._common import triton_masks

        return triton_masks

    return checked_on(where, load)
