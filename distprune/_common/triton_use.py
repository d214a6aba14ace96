"""Where Triton's kernels are used, and what every launch of them needs.

Importing this module does not import Triton, which need not be installed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.memory import Array

logger = logging.getLogger(__name__)

# Set to anything but 0 or nothing, devices use torch's operations alone.
NO_TRITON = "DISTPRUNE_NO_TRITON"

K = TypeVar("K")


def is_possible_on(where: torch.device) -> bool:
    """Whether Triton may compile for a device: its kind, and DISTPRUNE_NO_TRITON."""
    if memory.takes_numpy(where) or where.type not in ("cuda", "xpu"):
        return False
    return os.environ.get(NO_TRITON, "0") in ("", "0")


def checked_on(where: torch.device, load: Callable[[], K]) -> K | None:
    """Kernels, if they give on a device what torch's operations give.

    Args:
        load: imports the module that launches them. Its ``check_on`` raises an error if they give
            something else, or cannot be compiled or launched there.

    Returns:
        The module; None after an error, which is logged as a warning.
    """
    try:
        kernels = load()
        cast(ModuleType, kernels).check_on(where)
    except Exception as error:  # Triton, its compiler and the driver raise errors of many types
        logger.warning(
            "Triton's kernels are not used on %s (%s: %s); torch operations are used, which move "
            "several times as many bytes. Set %s=1 to say that this is meant.",
            where, type(error).__name__, error, NO_TRITON,
        )  # fmt: skip
        return None
    return kernels


def launching_on(where: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch kernels on this device."""
    if where.type == "cpu":  # by the interpreter
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = torch.get_device_module(where).device(
        where
    )
    return context


def numbered(counts: Array) -> tuple[Array, Array]:
    """Of rows of which each owner has some: the owner of each, and its number among the owner's.

    Args:
        counts: int64 [owners], how many rows each has.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def copied_to(where: torch.device, arrays: Sequence[Array]) -> list[Tensor]:
    """Arrays of int64 as 1-d tensors on a device, copied together; the host does not wait."""
    flats = [array.ravel() for array in arrays]
    both = memory.moved(torch.from_numpy(np.concatenate(flats)), where)
    return list(torch.split(both, [flat.size for flat in flats]))
