"""Memory on the CPU: large pages, scratch that is used again, and moves without threads.

Writing to memory for the first time costs more than all else that is done to a mask: the kernel
zeroes it page by page.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

# The integer of each size, as which bits are moved.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# So few elements no torch operation spreads over threads: for work that has its own.
SERIAL = 1 << 15

# From this size on the advice pays. Smaller than a large page, as neighbours may share one.
_LARGE_BYTES = 1 << 19

Array = np.ndarray
# A count, on the host or still on its way there from a device.
Count = int | Tensor


class Scratch:
    """Arrays that one thread uses again for every chunk."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, np.dtype], Array] = {}

    def array(self, use: str, size: int, dtype: np.dtype | type) -> Array:
        """An uninitialised array, 1-d; the next call for the same use returns the same memory."""
        key = (use, np.dtype(dtype))
        held = self._held.get(key)
        if held is None or held.size < size:
            held = self._held[key] = np.empty(size, dtype)
        return held[:size]


def takes_numpy(device: torch.device) -> bool:
    """Whether elements are worked on by numpy: on a CPU; by torch operations on other devices."""
    return device.type == "cpu"


def select(flat: Tensor, which: Tensor) -> Tensor:
    """``flat[which]`` for int64 positions or bool flags, 1-d.

    On a CPU by numpy: torch spreads even this over threads, which wait for each other longer than
    it takes where cores are shared.
    """
    if not takes_numpy(flat.device) or flat.itemsize not in INTEGERS:
        return flat[which]
    bits = flat.view(INTEGERS[flat.itemsize]).numpy()
    return torch.from_numpy(bits[which.numpy()]).view(flat.dtype)


def on_host(counts: Sequence[Count]) -> list[int]:
    """Counts as numbers. Waits for a device once, for all of them."""
    waiting = [count for count in counts if isinstance(count, Tensor)]
    if not waiting:
        return list(counts)  # type: ignore[arg-type]
    arrived = iter(torch.stack(waiting).tolist())
    return [next(arrived) if isinstance(count, Tensor) else count for count in counts]


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Of one dtype, which empty tensors do not decide; on the CPU."""
    filled = [tensor.numpy() for tensor in tensors if tensor.numel()]
    return torch.from_numpy(np.concatenate(filled)) if filled else torch.empty(0, dtype=torch.int64)


def empty_like(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``torch.empty_like``, in large pages where the system lets a program ask for them.

    Cost: on Linux with transparent huge pages (``always`` or ``madvise``), about a fourth of what
    the first write to ordinary pages costs. Elsewhere the same as ``torch.empty_like``.
    """
    new = torch.empty_like(values, dtype=dtype)
    if new.device.type == "cpu" and new.nbytes >= _LARGE_BYTES:
        _advise_large_pages(new.data_ptr(), new.nbytes)
    return new


def _advise_large_pages(address: int, num_bytes: int) -> None:
    advise = _madvise()
    if advise is None:
        return
    # Outwards, so that no page between two tensors keeps the system from joining them.
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    stop = -(-(address + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    # A hint: that the system refuses it changes nothing.
    advise(start, stop - start, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None).madvise
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return function
    return None
