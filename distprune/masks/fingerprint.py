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
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from distprune._common import mask_bits, mask_kernels, memory
from distprune._common.hashing import hash_keys
from distprune._common.mask_values import is_zero
from distprune._common.memory import SERIAL, Array, Count, lists_on_host
from distprune._common.triton_use import copied_to
from distprune.shards.shard import FlatShard, LocalShard

_BITS = 32  # of a word
_WORD = np.dtype("<u4")
_TABLE_LOG2 = 15  # log2 of the words whose weights are looked up in one table
_TABLE_MASK = (1 << _TABLE_LOG2) - 1
_TABLE_BITS = _BITS << _TABLE_LOG2
# A run of elements is processed in rows of _ROW, and rows in blocks of about this many elements.
_ROW = 1 << 14
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 20, 1 << 25
# Runs of many masks are processed together, about so many elements of them at a time.
_DEVICE_BATCH = 1 << 23
# So many factors of tables are remembered from call to call.
_FEW_TABLES = 64
# Shorter runs are processed element by element.
_SHORTEST_RUN = 64
# Triton's kernels have a row of a table for each run: so many, or one for so many elements.
_MOST_RUNS, _ELEMENTS_PER_RUN = 1 << 12, 1 << 8


def fingerprint_part(shard: LocalShard, mask: Tensor) -> Count:
    """The summand of this rank's part of a mask.

    The sum over ranks that together have each element once, modulo 2**64, is the fingerprint. A
    mask without a pruned element has fingerprint 0.

    Args:
        shard: position of the part in the parameter.
        mask: the part, laid out like ``shard.values``; any dtype, 0 = pruned.

    Returns:
        An int64; a 0-d tensor if the mask is on a device, to avoid a synchronisation.

    Cost: one read of the mask, and a copy if it is not in row-major order; 0.25 ns per element on
    one core where shards are whole rows or long pieces of rows.
    """
    if shard.index.start is not None and memory.takes_numpy(mask.device):
        return _wrapped(_of_run(shard.flat(mask.detach()), shard.index.start))
    part: Count = 0
    for rows, starts in _blocks(shard, mask.detach()):
        if memory.takes_numpy(mask.device):
            part = part + _of_rows(is_zero(rows), starts.numpy())
        else:
            part = part + _of_rows_on_device(rows == 0, starts.to(mask.device))
    return _wrapped(part)


def fingerprint_parts(shards: Sequence[LocalShard], masks: Sequence[Tensor]) -> list[int]:
    """:func:`fingerprint_part` of several masks, on the host; waits for a device once.

    Cost: a few microseconds for a short run on a CPU; they are processed together. On a device,
    what is launched does not grow with the number of masks that are runs, but with their size.
    """
    started = start_fingerprints(shards, masks)
    return started.finish(lists_on_host(started.vectors))


@dataclass(frozen=True)
class Started:
    """Fingerprints, some of which are on devices that have not been waited for.

    Attributes:
        parts: those that are known.
        positions: per device or batch, the positions of others ...
        vectors: ... and int64 [positions] on the device.
    """

    parts: list[int]
    positions: list[list[int]]
    vectors: list[Tensor]

    def finish(self, numbers: Sequence[Sequence[int]]) -> list[int]:
        """All of them, of the numbers in the vectors."""
        for positions, of_vector in zip(self.positions, numbers, strict=True):
            for position, number in zip(positions, of_vector, strict=True):
                self.parts[position] = number
        return self.parts


def start_fingerprints(shards: Sequence[LocalShard], masks: Sequence[Tensor]) -> Started:
    """:func:`fingerprint_parts`, which does not wait for any device."""
    started = Started([0] * len(shards), [], [])
    short: dict[torch.dtype, list[int]] = {}
    on_devices: dict[torch.device, list[int]] = {}
    for position, (shard, mask) in enumerate(zip(shards, masks, strict=True)):
        start = shard.index.start
        if not mask.numel():
            continue
        if not memory.takes_numpy(mask.device):
            on_devices.setdefault(mask.device, []).append(position)
        elif start is None or not _is_short(start, mask):
            started.parts[position] = int(fingerprint_part(shard, mask))
        else:
            short.setdefault(mask.dtype, []).append(position)
    for positions in short.values():
        for first in range(0, len(positions), _CPU_BLOCK // SERIAL):
            some = positions[first : first + _CPU_BLOCK // SERIAL]
            flats = [shards[position].flat(masks[position]) for position in some]
            starts = [shards[position].index.start or 0 for position in some]
            for position, part in zip(some, _of_short_runs(flats, starts), strict=True):
                started.parts[position] = part
    for device, positions in on_devices.items():
        for some, vector in _on_device(device, shards, masks, positions):
            started.positions.append(some)
            started.vectors.append(vector)
    return started


def _on_device(
    device: torch.device,
    shards: Sequence[LocalShard],
    masks: Sequence[Tensor],
    positions: Sequence[int],
) -> Iterator[tuple[list[int], Tensor]]:
    """(positions, int64 [positions] on the device) of masks that are not empty."""
    kernels = mask_kernels.mask_kernels_on(device)
    by_triton: dict[int, object] = {}
    in_words: dict[torch.dtype, list[int]] = {}
    for position in positions:
        shard, mask = shards[position], masks[position].detach()
        runs = None if kernels is None else _runs_for(kernels, shard, mask)
        if runs is not None:
            by_triton[position] = runs
        elif shard.index.start is not None and shard.index.start % _BITS == 0:
            in_words.setdefault(mask.dtype, []).append(position)
        else:
            part = fingerprint_part(shard, mask)
            assert isinstance(part, Tensor)
            yield [position], part.view(1)
    if kernels is not None and by_triton:
        yield [*by_triton], kernels.weigh([*by_triton.values()], _table_on(device), _factors)
    for some in in_words.values():
        flats = [shards[position].flat(masks[position].detach()) for position in some]
        starts = [shards[position].index.start or 0 for position in some]
        yield some, _of_words_on_device(flats, starts)


def _runs_for(kernels: ModuleType, shard: LocalShard, mask: Tensor) -> object | None:
    """A mask as Triton's kernels take it; None if they do not, or its runs are too many."""
    if not kernels.takes(mask):
        return None
    start = shard.index.start
    if start is not None:
        runs: object = kernels.MaskRuns(shard.flat(mask).contiguous(), mask.numel(), (start,))
        return runs
    length, starts = _runs(shard)
    if not 0 < len(starts) <= max(_MOST_RUNS, mask.numel() // _ELEMENTS_PER_RUN):
        return None
    if length * len(starts) != mask.numel():  # operations raise an error
        return None
    runs = kernels.MaskRuns(mask.reshape(-1).contiguous(), length, starts.numpy())
    return runs


def _is_short(start: int, mask: Tensor) -> bool:
    """Whether a run begins with a word, and takes few words of one table."""
    size = mask.numel()
    return start % _BITS == 0 and size <= SERIAL and start % _TABLE_BITS + size <= _TABLE_BITS


def _of_short_runs(flats: list[Tensor], starts: list[int]) -> list[int]:
    """:func:`_of_run` of several masks of one dtype that are not empty: see :func:`_is_short`."""
    sizes = [flat.numel() for flat in flats]
    num_words: list[int] = [-(-size // _BITS) for size in sizes]
    pruned = is_zero(torch.cat(flats))
    if any(size % _BITS for size in sizes):
        padded = np.zeros(sum(num_words) * _BITS, dtype=bool)
        first, first_bit = 0, 0
        for size, number in zip(sizes, num_words, strict=True):
            padded[first_bit : first_bit + size] = pruned[first : first + size]
            first, first_bit = first + size, first_bit + number * _BITS
        pruned = padded
    table, tables = _table().numpy().view(np.uint64), []
    weights = []
    for start, number in zip(starts, num_words, strict=True):
        table_number, offset = divmod(start, _TABLE_BITS)
        tables.append(table_number)
        weights.append(table[offset // _BITS : offset // _BITS + number])
    words = mask_bits.pack(pruned).view(_WORD).astype(np.uint64)
    words *= np.concatenate(weights)
    firsts = list(itertools.accumulate(num_words[:-1], initial=0))
    totals = np.add.reduceat(words, firsts).tolist()
    return [
        int(_wrapped(total * _factor(number))) for total, number in zip(totals, tables, strict=True)
    ]


def _of_run(flat: Tensor, start: int) -> int:
    """The sum for a 1-d run of elements whose first has the global index ``start``."""
    total, first, size = 0, 0, flat.numel()
    while first < size:
        # Stop at the end of a table of weights.
        length = min(size - first, _TABLE_BITS - (start + first) % _TABLE_BITS)
        table_number, offset = divmod(start + first, _TABLE_BITS)
        word, shift = divmod(offset, _BITS)
        pruned = is_zero(flat[first : first + length])
        num_words = -(-(shift + length) // _BITS)
        if shift or length % _BITS:
            padded = np.zeros(num_words * _BITS, dtype=bool)
            padded[shift : shift + length] = pruned
            pruned = padded
        words = mask_bits.pack(pruned).view(_WORD).astype(np.uint64)
        words *= _table().numpy()[word : word + num_words].view(np.uint64)
        total += int(np.add.reduce(words)) * _factor(table_number)
        first += length
    return total


def _blocks(shard: LocalShard, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The mask as blocks of rows [r, n], with the global index of each row's first element."""
    block = _CPU_BLOCK if memory.takes_numpy(mask.device) else _DEVICE_BLOCK
    if mask.numel() == 0:
        return
    length, starts = _runs(shard)
    if length < _SHORTEST_RUN:  # every element is a row
        rows = shard.flat(mask).unsqueeze(1)
        for first in range(0, len(rows), block):
            positions = torch.arange(first, min(first + block, len(rows)))
            yield rows[first : first + block], shard.index(positions)
        return
    flat = mask.reshape(-1)
    if len(starts) == 1 and length > _ROW:
        num_whole = length // _ROW * _ROW
        start = int(starts[0])
        starts = torch.arange(start, start + num_whole, _ROW)
        yield from _in_blocks(flat[:num_whole].view(-1, _ROW), starts, block)
        if num_whole < length:
            yield flat[num_whole:].view(1, -1), torch.tensor([start + num_whole])
        return
    yield from _in_blocks(flat.view(-1, length), starts, block)


def _in_blocks(rows: Tensor, starts: Tensor, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    height = max(1, block // rows.shape[1])
    for first in range(0, len(rows), height):
        yield rows[first : first + height], starts[first : first + height]


def _runs(shard: LocalShard) -> tuple[int, Tensor]:
    """Length and global start indices, int64 [runs], of the runs of a row-major part."""
    if shard.index.start is not None:
        return shard.values.numel(), torch.tensor([shard.index.start])
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


def _of_rows(pruned: Array, starts: Array) -> int:
    """The sum for rows, bool [r, n], that start at the global indices ``starts``, int64 [r]."""
    length, total = pruned.shape[1], 0
    shifts = starts % _BITS
    for shift in np.unique(shifts):
        has_shift = shifts == shift
        rows = pruned if has_shift.all() else pruned[has_shift]
        num_words = -(-(int(shift) + length) // _BITS)
        if shift or length % _BITS:
            padded = np.zeros((len(rows), num_words * _BITS), dtype=bool)
            padded[:, shift : shift + length] = rows
            rows = padded
        words = mask_bits.pack(rows).view(_WORD).astype(np.uint64)
        indices = (starts[has_shift] // _BITS)[:, None] + np.arange(num_words)
        high = indices >> _TABLE_LOG2
        first = high[0, 0]  # starts ascend
        factors = _odd(torch.arange(first, high[-1, -1] + 1), 4).numpy()
        words *= _table().numpy()[indices & _TABLE_MASK].view(np.uint64)
        words *= factors[high - first].view(np.uint64)
        total += int(words.sum(dtype=np.uint64))
    return total


def _of_rows_on_device(pruned: Tensor, starts: Tensor) -> Tensor:
    """As :func:`_of_rows`, by torch operations, without a synchronisation of the device."""
    length = pruned.shape[1]
    num_words = -(-(_BITS - 1 + length) // _BITS)
    bits = torch.arange(num_words * _BITS, device=pruned.device)
    columns = bits - (starts % _BITS).unsqueeze(1)
    is_inside = (columns >= 0) & (columns < length)
    shifted = pruned.gather(1, columns.clamp(0, length - 1)) & is_inside
    words = (shifted.view(-1, num_words, _BITS).long() << bits[:_BITS]).sum(2)
    indices = (starts // _BITS).unsqueeze(1) + bits[:num_words]
    factors = _odd((indices >> _TABLE_LOG2).view(-1), 4).view(indices.shape)
    return (words * _table_on(words.device)[indices & _TABLE_MASK] * factors).sum()


def _of_words_on_device(flats: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """:func:`_of_run` of several masks of one dtype and device, whose starts are starts of words.

    Returns:
        int64 [masks], on the device.
    """
    device = flats[0].device
    bits = torch.arange(_BITS, device=device)
    totals = torch.zeros(len(flats), dtype=torch.int64, device=device)
    ones = flats[0].new_ones(_BITS)
    for pieces in _batches(flats, starts):
        tensors, numbers = [], []
        for owner, first, size in pieces:
            tensors.append(flats[owner][first : first + size])
            if size % _BITS:
                tensors.append(ones[: -size % _BITS])
            numbers.append(-(-size // _BITS))
        begin = np.array([(starts[owner] + first) // _BITS for owner, first, _ in pieces])
        before = np.array([0, *itertools.accumulate(numbers[:-1])])
        word: Array = np.repeat(begin - before, numbers) + np.arange(sum(numbers))
        owners = np.array([owner for owner, _, _ in pieces])
        which, inverse = np.unique(word >> _TABLE_LOG2, return_inverse=True)
        index, factors, ends_there, owners_there = copied_to(
            device,
            [
                word & _TABLE_MASK,
                _factors(which)[inverse.reshape(-1)],
                before + numbers - 1,
                owners,
            ],
        )
        pruned = torch.cat(tensors) == 0
        words = (pruned.view(-1, _BITS).long() << bits).sum(1)
        # Sums of masks are differences of running sums, modulo 2**64.
        running = (words * _table_on(device)[index] * factors).cumsum(0)[ends_there]
        totals[owners_there] += running.diff(prepend=running.new_zeros(1))
    return totals


def _batches(
    flats: Sequence[Tensor], starts: Sequence[int]
) -> Iterator[list[tuple[int, int, int]]]:
    """(number of the mask, first element, how many) of pieces that are processed together."""
    batch: list[tuple[int, int, int]] = []
    room = _DEVICE_BATCH
    for owner, flat in enumerate(flats):
        first, size = 0, flat.numel()
        while first < size:
            length = min(size - first, room)
            batch.append((owner, first, length))
            first, room = first + length, room - -(-length // _BITS) * _BITS
            if room == 0:
                yield batch
                batch, room = [], _DEVICE_BATCH
    if batch:
        yield batch


@functools.cache
def _table() -> Tensor:
    """The weights of the words of one table; each is multiplied by the table's own factor."""
    return _odd(torch.arange(1 << _TABLE_LOG2), 3)


@functools.cache
def _table_on(device: torch.device) -> Tensor:
    return _table().to(device)


def _factors(table_numbers: Array) -> Array:
    """The factors of several tables, int64."""
    if len(table_numbers) <= _FEW_TABLES:  # which most calls ask for again
        return np.array([_factor(number) for number in table_numbers.tolist()], dtype=np.int64)
    factors: Array = _odd(torch.from_numpy(table_numbers), 4).numpy()
    return factors


@functools.lru_cache(maxsize=1 << 12)
def _factor(table_number: int) -> int:
    """The factor of a whole table."""
    return int(_odd(torch.tensor([table_number]), 4))


def _odd(numbers: Tensor, seed: int) -> Tensor:
    """Odd pseudo-random int64."""
    return (hash_keys(numbers, seed) << 1) | 1


def _wrapped(total: Count) -> Count:
    """A Python integer as int64 arithmetic wraps it."""
    return total if isinstance(total, Tensor) else (total + 2**63) % 2**64 - 2**63
