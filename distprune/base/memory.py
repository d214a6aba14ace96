"""Elements in memory: scratch arrays, copies without threads, bits of masks, hashes of indices.

As bits, which is the only bit order of the package, in files and on the wire, the first element of
a mask is in the lowest bit of the first byte:

    elements   0 1 2 3 4 5 6 7 | 8 9 ...
    values     1 0 0 1 1 1 0 1 | 1 0 ...
    bytes        0b10111001    | 0b...01

As tensors, two dtypes need care. A bool mask that was read from a file may hold true bytes other
than 1, and numpy has no bfloat16. torch's comparisons of bytes take twenty times as long.
"""

from __future__ import annotations

import contextlib
import functools
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The integer of each size in bytes: bits of any dtype are moved as one of these.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# torch does not spread operations on so few elements over threads: for work that has its own.
SERIAL = 1 << 15

Array = np.ndarray
# A number of elements: on the host, or a 0-d tensor on a device that has not been waited for.
Count = int | Tensor


class Scratch:
    """Arrays that one thread uses again for every chunk."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, np.dtype], Array] = {}

    def array(self, use: str, size: int, dtype: np.dtype | type) -> Array:
        """An uninitialised array, 1-d; the next call for the same use returns the same memory."""
        key = (use, np.dtype(dtype))
        array = self._arrays.get(key)
        if array is None or array.size < size:
            array = self._arrays[key] = np.empty(size, dtype)
        return array[:size]


def ordinary_tensors() -> contextlib.AbstractContextManager[None]:
    """A context in which new tensors may be part of a backward, also inside inference mode."""
    if torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def takes_numpy(device: torch.device) -> bool:
    """Whether numpy works on the elements, as on a CPU; on other devices torch operations do."""
    return device.type == "cpu"


def moved(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, for whose copy the host does not wait."""
    if device.type in ("cuda", "xpu"):
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def on_host(counts: Sequence[Any]) -> list[Any]:
    """Tensors of integers as int64 arrays, and what else there is as it is.

    Waits for a device once, for all of them.
    """
    tensors = [each for each in counts if isinstance(each, Tensor)]
    if not tensors:
        return list(counts)
    flat = torch.cat([each.view(-1).long().to(tensors[0].device) for each in tensors]).cpu().numpy()
    copied = iter(np.split(flat, np.cumsum([each.numel() for each in tensors])))
    return [next(copied).reshape(e.shape) if isinstance(e, Tensor) else e for e in counts]


def peak_rss_bytes() -> int:
    """The most memory of this process so far, or of the largest of its children that has ended."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux starts ru_maxrss with the peak of the process that started this one; VmHWM is its own.
    with contextlib.suppress(OSError, IndexError):
        own = int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])
    peak = max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def num_bytes_of(num_elements: int) -> int:
    """How many bytes the bits of so many elements fill."""
    return -(-num_elements // 8)


def pack(flags: Array) -> Array:
    """Flags as bits, along the last dimension.

    Args:
        flags: bool [..., n]; not 0 is 1.

    Returns:
        uint8 [..., ceil(n / 8)]; the bits after the last element are 0.
    """
    return np.packbits(flags, axis=-1, bitorder="little")


def unpack(packed: Array, start: int, stop: int) -> Array:
    """The flags [start, stop) of a mask.

    Args:
        packed: uint8, 1-d, as :func:`pack` returns it.
        start, stop: indices of elements.

    Returns:
        bool [stop - start].
    """
    return np.unpackbits(packed, count=stop, bitorder="little")[start:].view(bool)


def pack_words(flags: Array) -> Array:
    """Flags, 1-d, as int64 [ceil(n / 64)]: the first in the lowest bit of the first word.

    Words of ranks that set different bits can be summed: no bit carries into the next one.
    """
    words: Array = np.zeros(-(-flags.size // 64), dtype="<i8")
    words.view(np.uint8)[: num_bytes_of(flags.size)] = pack(flags)
    return words


def unpack_words(words: Array, num_elements: int) -> Array:
    """bool [num_elements] from what :func:`pack_words` returned."""
    return unpack(words.astype("<i8", copy=False).view("u1"), 0, num_elements)


def is_one(mask: Tensor, out: Array | None = None) -> Array:
    """bool, of the mask's shape: where it is exactly 1, or true.

    Args:
        out: bool, where to write it.
    """
    if mask.dtype is torch.bool:
        return np.not_equal(mask.view(torch.uint8).numpy(), 0, out=out)
    if mask.itemsize not in INTEGERS:
        return np.equal(mask.numpy(), 1, out=out)
    bits = mask.view(INTEGERS[mask.itemsize]).numpy()
    return np.equal(bits, bits_of_one(mask.dtype), out=out)


def is_zero(mask: Tensor, out: Array | None = None) -> Array:
    """bool, of the mask's shape: where it is +0 or -0.

    Args:
        out: bool, where to write it.
    """
    if mask.is_floating_point() and mask.itemsize == 1:
        mask = mask != 0  # numpy has no float8
    numbers: Array
    if mask.dtype is torch.bool:
        numbers = mask.view(torch.uint8).numpy()
    elif mask.dtype is torch.bfloat16:
        numbers = mask.view(torch.int16).numpy() << 1  # shifts the sign out
    else:
        numbers = mask.numpy()
    return np.equal(numbers, 0, out=out)


@functools.cache
def bits_of_one(dtype: torch.dtype) -> np.integer[Any]:
    """The bits of 1 in a dtype, as an integer of its size."""
    return torch.ones(1, dtype=dtype).view(INTEGERS[dtype.itemsize]).numpy()[0]


def zero_pruned(values: Tensor, mask: Tensor) -> None:
    """Write +0, in place, wherever a mask is 0: also over -0.0, inf and NaN.

    Args:
        values: of any dtype; no other tensor is to see the change.
        mask: of any dtype, of the same shape, on any device.

    Cost: on the CPU a multiplication of the bits by 0 or 1; torch's masked_fill_ branches at every
    element, and takes 5 to 20 times as long where zeros are scattered.
    """
    mask = mask.to(values.device)
    if values.device.type != "cpu" or values.itemsize not in INTEGERS:
        values.masked_fill_(mask.logical_not(), 0)
        return
    bits = values.view(INTEGERS[values.itemsize]).numpy()
    np.multiply(bits, ~is_zero(mask), out=bits)


LARGEST_HASH = 2**63 - 2
# The constants of SplitMix64, as int64.
_WEYL = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def draw_seed(generator: torch.Generator | None = None) -> Tensor:
    """Draw the seed of random scores: int64 [1], on the CPU.

    Args:
        generator: of the CPU; None: torch's default one.
    """
    return torch.randint(2**62, (1,), dtype=torch.int64, device="cpu", generator=generator)


def hash_keys(indices: Tensor, seed: int) -> Tensor:
    """63 well-mixed bits per index: the finaliser of SplitMix64 over a Weyl sequence.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014. int64 arithmetic wraps, so every device agrees.
    """
    x = indices * _WEYL + seed
    x ^= _shift(x, 30)
    x *= _MIX[0]
    x ^= _shift(x, 27)
    x *= _MIX[1]
    x ^= _shift(x, 31)
    return _shift(x, 1).clamp_(max=LARGEST_HASH)


def hash_in_place(indices: Array, seed: int, scratch: Scratch) -> None:
    """Replace an int64 array by its :func:`hash_keys`, with numpy.

    Makes no copies, and does not wait for other threads.
    """
    x, shifted = indices.view(np.uint64), scratch.array("shifted", indices.size, np.uint64)
    x *= np.uint64(_WEYL % 2**64)
    x += np.uint64(seed)
    for shift, factor in zip((30, 27), _MIX, strict=True):
        x ^= np.right_shift(x, np.uint64(shift), out=shifted)
        x *= np.uint64(factor % 2**64)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    x >>= np.uint64(1)
    np.minimum(indices, LARGEST_HASH, out=indices)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's is arithmetic on int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)
