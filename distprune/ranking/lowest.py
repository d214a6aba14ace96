"""The lowest keys of every block: rows, and N:M along the inputs."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from distprune.base.blocks import Blocks
from distprune.base.memory import Array, Scratch

# Elements that are ranked at a time if rows are interleaved, because ranking copies them.
_STRIPE = 1 << 19
# Longer blocks are partitioned: comparing all pairs would take more time.
_FEW = 16


def lowest_of(blocks: Blocks, keys: Array, scratch: Scratch | None = None) -> Array:
    """Which elements of blocks are pruned.

    Args:
        blocks: of one tensor.
        keys: 1-d, of whole bands.
        scratch: memory to use again; the result lies in it, until the next call.

    Returns:
        bool, like keys.

    Cost: scratch memory of about 10 bytes per element; 2 bytes for blocks of few elements.
    """
    scratch = scratch or Scratch()
    lowest = scratch.array("lowest", keys.size, bool)
    if blocks.num_pruned in (0, blocks.size):
        lowest.fill(blocks.num_pruned > 0)
    elif blocks.kernel == 1 and blocks.size <= _FEW:
        _lowest_of_few(keys, blocks, lowest, scratch)
    elif blocks.columns == 1:
        rows = (-1, blocks.size)
        _lowest_in_rows(keys.reshape(rows), blocks.num_pruned, lowest.reshape(rows), scratch)
    else:
        _lowest_in_columns(keys, blocks, lowest, scratch)
    return lowest


def _lowest_in_columns(keys: Array, blocks: Blocks, lowest: Array, scratch: Scratch) -> None:
    """:func:`_lowest_in_rows` of rows that are interleaved: they are copied apart, and back."""
    shape = (-1, blocks.length, blocks.columns, blocks.kernel)
    bands, lowest = keys.reshape(shape), lowest.reshape(shape)
    num_bands = max(_STRIPE // blocks.band, 1)
    num_columns = max(_STRIPE // blocks.size, 1)
    for first in range(0, len(bands), num_bands):
        for column in range(0, blocks.columns, num_columns):
            part = np.s_[first : first + num_bands, :, column : column + num_columns]
            turned = bands[part].swapaxes(1, 2)
            apart = scratch.array("apart", turned.size, keys.dtype)
            np.copyto(apart.reshape(turned.shape), turned)
            of_part = scratch.array("lowest apart", turned.size, bool)
            rows = (-1, blocks.size)
            _lowest_in_rows(apart.reshape(rows), blocks.num_pruned, of_part.reshape(rows), scratch)
            lowest[part] = of_part.reshape(turned.shape).swapaxes(1, 2)


def _lowest_in_rows(keys: Array, k: int, lowest: Array, scratch: Scratch) -> None:
    """The k lowest keys of every row; among equal ones those further left.

    Args:
        keys: [rows, n].
        k: 0 < k < n.
        lowest: bool [rows, n]; k of them become True in each row.
    """
    ordered = scratch.array("ordered", keys.size, keys.dtype).reshape(keys.shape)
    np.copyto(ordered, keys)
    ordered.partition(k - 1, axis=1)
    threshold = ordered[:, k - 1 : k].copy()
    np.less_equal(keys, threshold, out=lowest)
    if np.count_nonzero(lowest) == len(keys) * k:
        return
    # The last ties of a row stay, as many as are too many.
    num_extra = lowest.view(np.uint8).sum(axis=1, dtype=np.int32, keepdims=True) - k
    ties = np.equal(keys, threshold, out=scratch.array("ties", keys.size, bool).reshape(keys.shape))
    ordinals = scratch.array("ordinals", keys.size, np.int32).reshape(keys.shape)
    np.cumsum(ties, axis=1, dtype=np.int32, out=ordinals)
    ties &= ordinals > ordinals[:, -1:] - num_extra
    lowest ^= ties


def _lowest_of_few(keys: Array, blocks: Blocks, lowest: Array, scratch: Scratch) -> None:
    """The lowest of short blocks, by comparing all pairs of elements in all blocks at once.

    The place of an element in its block is how many others come before it: as many as stand before
    it, and those after it that are lower, less those before it that are larger.
    """

    def planes(use: str, dtype: np.dtype | type) -> Array:
        """[length, bands, columns]: neighbours are of different blocks."""
        return scratch.array(use, keys.size, dtype).reshape(blocks.length, -1, blocks.columns)

    shape = (-1, blocks.length, blocks.columns)
    apart, places, flags = (
        planes("apart", keys.dtype), planes("places", np.uint8), planes("lowest apart", bool)
    )  # fmt: skip
    np.copyto(apart, keys.reshape(shape).swapaxes(0, 1))
    places[:] = np.arange(blocks.length, dtype=np.uint8)[:, None, None]
    for left, right in itertools.combinations(range(blocks.length), 2):
        is_lower = np.less(apart[right], apart[left], out=flags[0]).view(np.uint8)
        places[left] += is_lower
        places[right] -= is_lower
    np.less(places, blocks.num_pruned, out=flags)
    np.copyto(lowest.reshape(shape), flags.swapaxes(0, 1))


def lowest_on_device(blocks: Blocks, keys: Tensor) -> Tensor:
    """:func:`lowest_of` by torch operations: bool, like keys."""
    shape = (-1, blocks.length, blocks.columns, blocks.kernel)
    turned = keys.view(shape).transpose(1, 2)
    rows = turned.reshape(-1, blocks.size)  # one for each block
    first = rows.sort(dim=1, stable=True).indices[:, : blocks.num_pruned]
    chosen = torch.zeros(rows.shape, dtype=torch.bool, device=rows.device).scatter_(1, first, True)
    return chosen.view(turned.shape).transpose(1, 2).reshape(-1)
