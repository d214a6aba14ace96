"""Fingerprints and counts of many masks in one launch per kind of mask, by Triton.

Cost: each element is read once. The host builds a table of 40 bytes per tile, and does not wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from distprune._common import triton_masks_source as source
from distprune._common.hashing import hash_keys
from distprune._common.mask_values import bits_of_one
from distprune._common.memory import Array
from distprune._common.triton_use import copied_to, launching_on, numbered

# Elements that a program reads at a time; tests make it smaller. A power of two.
BLOCK = 4096
# A tile has at most so many blocks; few enough for this many tiles, where there are so many blocks.
_LARGEST_TILE, _NUM_TILES = 64, 4096
# Tiles of one launch: their table, 10 MiB, is pinned.
_MOST_TILES = 1 << 18
# Addresses that are multiples of this let a thread read several elements at a time.
_ALIGNMENT = 16
_NUM_WARPS = 8
_BITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_EXPONENTS = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_TAKEN = {*_EXPONENTS, *_INTEGERS}
# Columns of a tile, as in triton_masks_source.py.
MASK, LENGTH, FIRST, FACTOR, WIDTH = range(5)
VALUES, PRODUCT = 2, 3


def takes(*tensors: Tensor | None) -> bool:
    """Whether the kernels can read some tensors."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in _TAKEN:
            return False
        # Memory that a wrapper has freed is left to operations that raise an error.
        if not tensor.data_ptr() and tensor.numel():
            return False
    return True


class MaskRuns(NamedTuple):
    """A mask as runs of elements whose indices follow one another.

    Attributes:
        flat: the mask, 1-d, contiguous.
        length: of each run; they lie one after the other.
        starts: the index of the first element of each.
    """

    flat: Tensor
    length: int
    starts: Sequence[int] | Array


def weigh(masks: Sequence[MaskRuns], weights: Tensor, factors: Callable[[Array], Array]) -> Tensor:
    """Add up the weights of the pruned elements of each mask, modulo 2**64.

    Args:
        masks: on one device.
        weights: int64 [2**n], on the device: the weight of element i of a table is
            weights[i >> 5] << (i & 31).
        factors: by which the weights are multiplied in some tables, int64, by their numbers. The
            tables follow one another; each has as many elements as the weights have bits of 32.

    Returns:
        int64 [masks], on the device.
    """
    device = weights.device
    totals = torch.zeros(len(masks), dtype=torch.int64, device=device)
    of_dtype: dict[torch.dtype, list[int]] = {}
    for position, mask in enumerate(masks):
        if mask.flat.numel():
            of_dtype.setdefault(mask.flat.dtype, []).append(position)
    for dtype, positions in of_dtype.items():
        table, owners = _weighed(masks, positions, 32 * weights.numel(), factors)
        aligned = (table[:, MASK] % _ALIGNMENT == 0) & (table[:, FIRST] % 4 == 0)
        for is_aligned in (True, False):
            for rows, of_rows in _launches(table, owners, aligned == is_aligned):
                on_device, index = copied_to(device, [rows, of_rows])
                sums = torch.empty(len(rows), dtype=torch.int64, device=device)
                with launching_on(device):
                    source.weigh_tiles[(len(rows),)](
                        on_device, weights, sums, _numbers(dtype), is_aligned,
                        is_aligned and dtype.itemsize == 1, BLOCK, num_warps=_NUM_WARPS,
                    )  # fmt: skip
                totals.index_add_(0, index, sums)
    return totals


def _weighed(
    masks: Sequence[MaskRuns],
    positions: Sequence[int],
    table_size: int,
    factors: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Rows of the tiles of masks of one dtype, and the position of the mask of each."""
    chosen = [masks[position] for position in positions]
    numbers = [len(mask.starts) for mask in chosen]
    if max(numbers) == 1:
        starts = np.array([mask.starts[0] for mask in chosen], dtype=np.int64)
    else:
        starts = np.concatenate([np.asarray(mask.starts, dtype=np.int64) for mask in chosen])
    owner, before = numbered(np.array(numbers))
    lengths = np.array([mask.length for mask in chosen])[owner]
    before *= lengths
    itemsize = chosen[0].flat.itemsize
    addresses = np.array([mask.flat.data_ptr() for mask in chosen])[owner] + before * itemsize
    # Tiles end at multiples of their size, and so does a table of weights: no tile is in two.
    size = min(_tile_size(int(lengths.sum())), table_size)
    low = starts // size
    per_run = (starts + lengths - 1) // size - low + 1
    run, number = numbered(per_run)
    number += low[run]
    first = np.maximum(number * size, starts[run])
    stop = np.minimum((number + 1) * size, (starts + lengths)[run])
    which, inverse = np.unique(first // table_size, return_inverse=True)
    table = np.empty((len(run), WIDTH), dtype=np.int64)
    table[:, MASK] = addresses[run] + (first - starts[run]) * itemsize
    table[:, LENGTH] = stop - first
    table[:, FIRST] = first % table_size
    table[:, FACTOR] = factors(which)[inverse.reshape(-1)]
    return table, np.asarray(positions, dtype=np.int64)[owner[run]]


class MaskRead(NamedTuple):
    """A mask, and what lies under it, to be counted; all 1-d, contiguous, of one length.

    Attributes:
        mask: flat.
        values: floating-point numbers that should be finite under the mask; None: not looked at.
        product: should be 0 under the mask; None: not looked at.
    """

    mask: Tensor
    values: Tensor | None = None
    product: Tensor | None = None

    @property
    def kind(self) -> tuple[torch.dtype | None, ...]:
        """What a kernel is compiled for."""
        tensors = (self.mask, self.values, self.product)
        return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def count(reads: Sequence[MaskRead], device: torch.device) -> Tensor:
    """Count the elements of masks on one device.

    Returns:
        int64 [reads, 4], on the device: how many are 0, how many are exactly 1; and under zeros,
        how many values are infinite or NaN, and how many products are not 0.
    """
    totals = torch.zeros((len(reads), 4), dtype=torch.int64, device=device)
    of_kind: dict[tuple[torch.dtype | None, ...], list[int]] = {}
    for position, read in enumerate(reads):
        if read.mask.numel():
            of_kind.setdefault(read.kind, []).append(position)
    for kind, positions in of_kind.items():
        forms = [None if dtype is None else _numbers(dtype) for dtype in kind]
        table, owners = _counted([reads[position] for position in positions], positions)
        aligned = (table[:, [MASK, VALUES, PRODUCT]] % _ALIGNMENT == 0).all(axis=1)
        for is_aligned in (True, False):
            for rows, of_rows in _launches(table, owners, aligned == is_aligned):
                on_device, index = copied_to(device, [rows, of_rows])
                counts = torch.empty((len(rows), 4), dtype=torch.int32, device=device)
                with launching_on(device):
                    source.count_tiles[(len(rows),)](
                        on_device, counts, *forms, is_aligned, BLOCK, num_warps=_NUM_WARPS
                    )
                totals.index_add_(0, index, counts.long())
    return totals


def _counted(reads: Sequence[MaskRead], positions: Sequence[int]) -> tuple[Array, Array]:
    """As :func:`_weighed`, for :func:`count`; of one kind."""
    lengths = np.array([read.mask.numel() for read in reads], dtype=np.int64)
    size = _tile_size(int(lengths.sum()))
    which, number = numbered(-(-lengths // size))
    first = number * size
    table = np.zeros((len(which), WIDTH), dtype=np.int64)
    tensors = zip(*((read.mask, read.values, read.product) for read in reads), strict=True)
    for column, of_column in zip((MASK, VALUES, PRODUCT), tensors, strict=True):
        if of_column[0] is not None:
            addresses = np.array([each.data_ptr() for each in of_column], dtype=np.int64)
            table[:, column] = addresses[which] + first * of_column[0].itemsize
    table[:, LENGTH] = np.minimum(size, lengths[which] - first)
    return table, np.asarray(positions, dtype=np.int64)[which]


def _tile_size(num_elements: int) -> int:
    """Elements of a tile, a power of two: large where there are many tiles."""
    num_blocks = min(_LARGEST_TILE, max(1, num_elements // (BLOCK * _NUM_TILES)))
    return BLOCK << (num_blocks.bit_length() - 1)


def _launches(table: Array, owners: Array, chosen: Array) -> Iterator[tuple[Array, Array]]:
    """Some rows and their owners, a launch at a time."""
    rows, of_rows = table[chosen], owners[chosen]
    for start in range(0, len(rows), _MOST_TILES):
        yield rows[start : start + _MOST_TILES], of_rows[start : start + _MOST_TILES]


@functools.cache
def _numbers(dtype: torch.dtype) -> source.Numbers:
    is_bool = dtype is torch.bool
    exponent = _EXPONENTS.get(dtype, 0)
    one = 1 if is_bool else int(bits_of_one(dtype))
    return source.Numbers(_BITS[dtype.itemsize], exponent != 0, is_bool, one, exponent)


_NUM_ELEMENTS = 20_011  # some blocks, and a part of one


def check_on(where: torch.device) -> None:
    """Read some masks on a device, by Triton's kernels and by torch's operations.

    Raises:
        RuntimeError: the results differ.
        Exception: of any type, if kernels cannot be compiled or launched there.
    """
    index = torch.arange(_NUM_ELEMENTS, device=where)
    weights = hash_keys(torch.arange(1 << 9), 5).to(where)
    size = 32 * weights.numel()
    for dtype in (torch.bool, torch.float32):
        mask = ((index * 7919) % 1009 > 400).to(dtype)
        if dtype.is_floating_point:
            mask[::11] = 0.5
            mask[::13] = -0.0
        for flat, start in ((mask, 64), (mask[3:], 5)):
            place = index[: flat.numel()] + start
            weight = weights[place % size >> 5] << (place & 31)
            expected = torch.where(flat == 0, weight * (place // size + 3), 0).sum()
            found = weigh([MaskRuns(flat, flat.numel(), np.array([start]))], weights, _plus_three)
            _compare("weighted sums", expected.tolist(), found[0].tolist())
            values = torch.where(index[: flat.numel()] % 17 == 0, float("nan"), 1.0)
            product = values * flat
            zero = flat == 0
            counts = [zero, flat == 1, zero & ~values.isfinite(), zero & (product != 0)]
            found = count([MaskRead(flat, values, product)], where)
            _compare("counts", [int(each.sum()) for each in counts], found[0].tolist())


def _plus_three(numbers: Array) -> Array:
    return numbers + 3


def _compare(what: str, expected: object, found: object) -> None:
    if expected != found:
        raise RuntimeError(f"{what} of masks differ from those of torch's operations")
