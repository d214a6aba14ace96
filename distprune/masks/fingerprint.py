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
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from distprune._common import mask_bits, memory
from distprune._common.hashing import hash_keys
from distprune._common.mask_values import is_zero
from distprune._common.memory import Array, lists_on_host
from distprune.shards.shard import FlatShard, LocalShard

_BITS = 32  # of a word
_TABLE_LOG2 = 15  # log2 of the words whose weights are looked up in one table
_TABLE_MASK = (1 << _TABLE_LOG2) - 1
_TABLE_BITS = _BITS << _TABLE_LOG2
# Elements that are processed together, about.
_CPU_BATCH, _DEVICE_BATCH = 1 << 20, 1 << 25
# Shorter runs are processed element by element.
_SHORTEST_RUN = 64

# Elements of one mask in row-major order, in one table: (position of the mask, index of the first
# element in the whole parameter, the elements).
_Piece = tuple[int, int, Tensor]


def fingerprint_parts(shards: Sequence[LocalShard], masks: Sequence[Tensor]) -> list[int]:
    """The summand of this rank's part of each of some masks, an int64.

    The sum over ranks that together have each element once, modulo 2**64, is the fingerprint. A
    mask without a pruned element has fingerprint 0.

    Args:
        shards: positions of the parts in their parameters.
        masks: the parts, each laid out like ``shard.values``; any dtype, 0 = pruned.

    Cost: one read of the masks, and a copy of those that are not in row-major order; 0.25 ns per
    element on one core where shards are whole rows or long pieces of rows. Small masks are
    processed together. Waits for a device once.
    """
    # The numbers of the sums, each with the table that its pieces lie in; and the sums.
    owners: list[list[tuple[int, int]]] = []
    sums: list[Tensor] = []
    runs: dict[tuple[torch.device, torch.dtype], list[_Piece]] = {}
    for position, (shard, local) in enumerate(zip(shards, masks, strict=True)):
        mask, start = local.detach(), shard.index.start
        if start is not None:
            run = position, start, shard.flat(mask)
            runs.setdefault((mask.device, mask.dtype), []).append(run)
        elif mask.numel():
            owners.append([(position, -1)])
            sums.append(_of_strided(shard, mask).view(1))
    for (device, _), of_kind in runs.items():
        for batch in _batches(of_kind, _batch_size(device)):
            owners.append([(position, start // _TABLE_BITS) for position, start, _ in batch])
            sums.append(_of_pieces([(start, flat) for _, start, flat in batch]))
    totals = [0] * len(shards)
    for of_sums, numbers in zip(owners, lists_on_host(sums), strict=True):
        for (position, table), number in zip(of_sums, numbers, strict=True):
            totals[position] += number if table < 0 else number * _factor(table)
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


def _batch_size(device: torch.device) -> int:
    return _CPU_BATCH if memory.takes_numpy(device) else _DEVICE_BATCH


def _batches(runs: Iterable[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Cut runs at the ends of tables; pieces are copied together, but for large ones on a CPU."""
    batch: list[_Piece] = []
    num_elements = 0
    for position, start, flat in runs:
        first = 0
        while first < flat.numel():
            length = min(flat.numel() - first, _TABLE_BITS - (start + first) % _TABLE_BITS)
            piece = position, start + first, flat[first : first + length]
            first += length
            if length > size // 8:
                yield [piece]
                continue
            batch.append(piece)
            num_elements += length
            if num_elements >= size:
                yield batch
                batch, num_elements = [], 0
    if batch:
        yield batch


def _of_pieces(pieces: Sequence[tuple[int, Tensor]]) -> Tensor:
    """int64 [pieces]: the sum of word * weight of each, without the factor of its table.

    Args:
        pieces: (index of the first element, the elements), of one dtype, on one device; not empty.
    """
    filler = pieces[0][1].new_ones(_BITS)
    tensors, weights, ends = [], [], []
    table, end = _table_on(filler.device), 0
    for start, flat in pieces:
        first, before = divmod(start % _TABLE_BITS, _BITS)
        after = -(before + flat.numel()) % _BITS
        tensors += [filler[:before]] * (before > 0) + [flat] + [filler[:after]] * (after > 0)
        num_words = (before + flat.numel() + after) // _BITS
        weights.append(table[first : first + num_words])
        ends.append(end := end + num_words)
    words = _words(_is_zero(tensors[0] if len(tensors) == 1 else torch.cat(tensors)))
    if len(pieces) == 1:
        return (words * weights[0]).sum().view(1)
    # Sums of pieces are differences of running sums, modulo 2**64.
    running = (words * torch.cat(weights)).cumsum(0)
    upto = running[memory.moved(torch.tensor(ends) - 1, running.device)]
    return upto.diff(prepend=upto.new_zeros(1))


def _of_strided(shard: LocalShard, mask: Tensor) -> Tensor:
    """int64, 0-d: the summand of a part that is no run of elements."""
    length, starts = _runs(shard)
    by_element = length < _SHORTEST_RUN
    rows = shard.flat(mask).unsqueeze(1) if by_element else mask.reshape(-1, length)
    total = torch.zeros((), dtype=torch.int64, device=mask.device)
    height = max(1, _batch_size(mask.device) // rows.shape[1])
    for first in range(0, len(rows), height):
        last = min(first + height, len(rows))
        here = shard.index(torch.arange(first, last)) if by_element else starts[first:last]
        total += _of_rows(rows[first:last], here.numpy())
    return total


def _of_rows(rows: Tensor, starts: Array) -> Tensor:
    """The sum for rows [r, n] whose first elements have the indices ``starts``, int64 [r]."""
    device, shifts = rows.device, starts % _BITS
    pruned = _is_zero(rows)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for shift in np.unique(shifts).tolist():
        chosen = np.flatnonzero(shifts == shift)
        own = pruned
        if len(chosen) < len(rows):
            own = pruned[memory.moved(torch.from_numpy(chosen), device)]
        own = nn.functional.pad(own, (shift, -(shift + own.shape[1]) % _BITS))
        words = _words(own.reshape(-1)).view(len(own), -1)
        first_words = memory.moved(torch.from_numpy(starts[chosen] // _BITS), device)
        indices = first_words.unsqueeze(1) + torch.arange(words.shape[1], device=device)
        factors = _odd((indices >> _TABLE_LOG2).view(-1), 4).view(words.shape)
        total += (words * _table_on(device)[indices & _TABLE_MASK] * factors).sum()
    return total


def _is_zero(mask: Tensor) -> Tensor:
    return torch.from_numpy(is_zero(mask)) if memory.takes_numpy(mask.device) else mask == 0


def _words(pruned: Tensor) -> Tensor:
    """Flags, 1-d, as words: int64."""
    if memory.takes_numpy(pruned.device):
        return torch.from_numpy(mask_bits.pack(pruned.numpy()).view("<u4").astype(np.int64))
    # Eight bytes that are 0 or 1 become eight bits: every product of a byte and a bit of the
    # factor is at a place of its own.
    packed = (pruned.view(torch.int64) * 0x0102040810204080 >> 56).to(torch.uint8)
    return packed.view(torch.int32).long() & 0xFFFFFFFF


def _runs(shard: LocalShard) -> tuple[int, Tensor]:
    """Length and global start indices, int64 [runs], of the runs of a row-major part."""
    if isinstance(shard, FlatShard):  # a run in another order of memory
        return 1, torch.empty(0)
    sizes = [len(indices) for indices in shard.coordinates]
    shape = shard.opened_shape
    dim = len(sizes) - 1  # the slowest dimension inside a run
    while dim > 0 and sizes[dim] == shape[dim]:
        dim -= 1
    starts = torch.zeros(1, dtype=torch.int64)
    for outer_dim, indices in enumerate(shard.coordinates[: dim + 1]):
        stride = math.prod(shape[outer_dim + 1 :])
        stop = indices.start + 1 if outer_dim == dim else indices.stop
        offsets = torch.arange(indices.start, stop) * stride
        starts = (starts.unsqueeze(1) + offsets).view(-1)
    return math.prod(sizes[dim:]), starts


@functools.cache
def _table_on(device: torch.device) -> Tensor:
    """The weights of the words of one table; each is multiplied by the table's own factor."""
    return _odd(torch.arange(1 << _TABLE_LOG2), 3).to(device)


@functools.lru_cache(maxsize=1 << 12)
def _factor(table_number: int) -> int:
    """The factor of a whole table."""
    return int(_odd(torch.tensor([table_number]), 4))


def _odd(numbers: Tensor, seed: int) -> Tensor:
    """Odd pseudo-random int64."""
    return (hash_keys(numbers, seed) << 1) | 1
