"""Fingerprints: one integer for a whole mask, the same on any sharding.

The pruned elements of a whole parameter, in row-major order, are a string of bits. It is divided
into words of 32 bits, and the fingerprint is the sum of word * weight(position of the word), modulo
2**64. Each rank sums its own bits of every word, so that the sum over all shards is the
fingerprint, whatever the shards are:

    bits of the mask     0110...1 | 1000...0 | 0001...1 | ...       1 = pruned
    words of 32 bits        w0    |    w1    |    w2    | ...
    fingerprint          w0 * c0  + w1 * c1  + w2 * c2  + ...       mod 2**64

[Note: exchanged bits] A weight is an odd, pseudo-random 64-bit number, and a word has 32 bits
only: whichever two bits of a mask are exchanged, at least 32 random bits of the sum change. (With
words of 64 bits an exchange of their highest bits would change nothing.)

Source: multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast",
The Computer Journal 2014.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from distprune.base import mask_bits, memory
from distprune.base.hashing import hash_keys
from distprune.base.memory import Array
from distprune.shards.shard import FlatShard, LocalShard

_BITS = 32  # of a word
_TABLE_LOG2 = 15  # log2 of the words whose weights are looked up in one table
_TABLE_BITS = _BITS << _TABLE_LOG2
# A run of elements is processed in rows of _ROW, and rows in blocks of about this many elements.
_ROW = 1 << 14
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 20, 1 << 25
# Shorter runs are processed element by element.
_SHORTEST_RUN = 64


def fingerprint_part(shard: LocalShard, mask: Tensor) -> Tensor:
    """The summand of this rank's part of a mask.

    The sum over ranks that together have each element once, modulo 2**64, is the fingerprint. A
    mask without a pruned element has fingerprint 0.

    Args:
        shard: position of the part in the parameter.
        mask: the part, laid out like ``shard.values``; any dtype, 0 = pruned.

    Returns:
        int64, 0-d, on the device of the mask, which is not waited for.

    Cost: one read of the mask, and a copy if it is not in row-major order; 0.3 ns per element on
    one core where shards are whole rows or long pieces of rows.
    """
    total = torch.zeros((), dtype=torch.int64, device=mask.device)
    for rows, starts in _blocks(shard, mask.detach()):
        shifts = starts % _BITS
        for shift in np.unique(shifts).tolist():
            chosen = (shifts == shift).nonzero()[0]
            some = rows
            if len(chosen) < len(shifts):
                some = rows[memory.moved(torch.from_numpy(chosen), rows.device)]
            total += _of_rows(some == 0, starts[chosen], shift)
    return total


def fingerprint_parts(shards: Sequence[LocalShard], masks: Sequence[Tensor]) -> list[int]:
    """:func:`fingerprint_part` of several masks, on the host; waits for a device once."""
    parts = [fingerprint_part(*pair) for pair in zip(shards, masks, strict=True)]
    return [number for (number,) in memory.lists_on_host([part.view(1) for part in parts])]


def _blocks(shard: LocalShard, mask: Tensor) -> Iterator[tuple[Tensor, Array]]:
    """The mask as blocks of rows [r, n], with the global index of each row's first element."""
    block = _CPU_BLOCK if memory.takes_numpy(mask.device) else _DEVICE_BLOCK
    if mask.numel() == 0:
        return
    length, starts = _runs(shard)
    if length < _SHORTEST_RUN:  # every element is a row
        rows = shard.flat(mask).unsqueeze(1)
        for first in range(0, len(rows), block):
            positions = torch.arange(first, min(first + block, len(rows)))
            yield rows[first : first + block], shard.index(positions).numpy()
        return
    flat = mask.reshape(-1)
    if len(starts) == 1 and length > _ROW:
        num_whole = length // _ROW * _ROW
        start = int(starts[0])
        starts = np.arange(start, start + num_whole, _ROW)
        yield from _in_blocks(flat[:num_whole].view(-1, _ROW), starts, block)
        if num_whole < length:
            yield flat[num_whole:].view(1, -1), np.array([start + num_whole])
        return
    yield from _in_blocks(flat.view(-1, length), starts, block)


def _in_blocks(rows: Tensor, starts: Array, block: int) -> Iterator[tuple[Tensor, Array]]:
    height = max(1, block // rows.shape[1])
    for first in range(0, len(rows), height):
        yield rows[first : first + height], starts[first : first + height]


def _runs(shard: LocalShard) -> tuple[int, Array]:
    """Length and global start indices, int64 [runs], of the runs of a row-major part."""
    if shard.index.start is not None:
        return shard.values.numel(), np.array([shard.index.start])
    if isinstance(shard, FlatShard):  # a run in another order of memory
        return 1, np.empty(0)
    sizes = [len(indices) for indices in shard.coordinates]
    shape = shard.opened_shape
    dim = len(sizes) - 1  # the slowest dimension inside a run
    while dim > 0 and sizes[dim] == shape[dim]:
        dim -= 1
    starts: Array = np.zeros(1, np.int64)
    for outer_dim, indices in enumerate(shard.coordinates[: dim + 1]):
        stride = math.prod(shape[outer_dim + 1 :])
        stop = indices.start + 1 if outer_dim == dim else indices.stop
        offsets = np.arange(indices.start, stop) * stride
        starts = (starts[:, None] + offsets).reshape(-1)
    return math.prod(sizes[dim:]), starts


def _of_rows(pruned: Tensor, starts: Array, shift: int) -> Tensor:
    """The sum for rows, bool [r, n].

    Args:
        starts: global indices of their first elements, int64 [r].
        shift: the bit of a word at which all of them start.
    """
    fill = -(shift + pruned.shape[1]) % _BITS
    if shift or fill:
        pruned = nn.functional.pad(pruned, (shift, fill))
    words, device = _words(pruned), pruned.device
    num_words = words.shape[1]
    first = int(starts.min()) // _TABLE_BITS
    last = (int(starts.max()) // _BITS + num_words - 1) >> _TABLE_LOG2
    factors = memory.moved(_odd(torch.arange(first, last + 1), 4), device)
    indices = memory.moved(torch.from_numpy(starts // _BITS), device).unsqueeze(1)
    indices = indices + torch.arange(num_words, device=device)
    weights = _table(device)[indices & ((1 << _TABLE_LOG2) - 1)]
    return (words * weights * factors[(indices >> _TABLE_LOG2) - first]).sum()


def _words(pruned: Tensor) -> Tensor:
    """Rows of bits, bool [r, 32 n], as words, int64 [r, n]; the first bit is the lowest one."""
    if memory.takes_numpy(pruned.device):
        packed = torch.from_numpy(mask_bits.pack(pruned.numpy()))
    else:
        # The highest byte of each product has the lowest bits of the eight bytes of its factor.
        packed = ((pruned.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)
    return packed.view(torch.int32).long() & 0xFFFFFFFF


@functools.cache
def _table(device: torch.device) -> Tensor:
    """The weights of the words of one table; each is multiplied by the table's own factor."""
    return _odd(torch.arange(1 << _TABLE_LOG2), 3).to(device)


def _odd(numbers: Tensor, seed: int) -> Tensor:
    """Odd pseudo-random int64."""
    return (hash_keys(numbers, seed) << 1) | 1
