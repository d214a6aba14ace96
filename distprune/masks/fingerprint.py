"""Fingerprints: one integer for a whole mask, the same on any sharding.

The pruned elements of a whole parameter, in row-major order, are a string of bits. It is divided
into words of 32 bits, and the fingerprint is the sum of word * weight(position of the word), modulo
2**64. Each rank sums its own bits of every word, so that the sum over all shards is the
fingerprint, whatever the shards are. A run is elements that follow each other in the whole
parameter. One that is all of a mask is padded to words and packed; so are runs of whole words; each
element of any other is a word of one bit:

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
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from distprune.base import memory
from distprune.base.memory import hash_keys
from distprune.shards.geometry import IndexMap
from distprune.shards.shard import Shard

_BITS = 32  # of a word
_TABLE_LOG2 = 15
_TABLE = 1 << _TABLE_LOG2  # the words whose weights are in one table
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 20, 1 << 25  # elements at a time


def fingerprint_parts(shards: Sequence[Shard], masks: Sequence[Tensor]) -> list[int]:
    """The summands of this rank's parts of some masks.

    The sum over ranks that together have each element once, modulo 2**64, is the fingerprint. A
    mask without a pruned element has fingerprint 0.

    Args:
        shards: positions of the parts in their parameters.
        masks: the parts, laid out like ``shard.values``; any dtype, 0 = pruned.

    Cost: one read of the masks, and a copy of one that is not laid out in memory like its shard;
    0.3 ns per element on one core where shards are whole rows or long pieces of rows. Waits for a
    device once.
    """
    # Small masks that are whole words are one string of words.
    joined: dict[object, list[int]] = {}
    sums: list[Tensor] = []
    order: list[int] = []
    for number, (shard, mask) in enumerate(zip(shards, masks, strict=True)):
        start, size = shard.index.start, shard.flat_values.shape[0]
        if start is not None and 0 < size <= memory.SERIAL and not (start | size) % _BITS:
            joined.setdefault((mask.dtype, mask.device), []).append(number)
        else:
            order.append(number)
            zero = torch.zeros((), dtype=torch.int64, device=mask.device)
            words = _words(shard.index, shard.flat(mask))
            sums.append(sum((_weighted(*each).sum() for each in words), zero))
    for several in joined.values():
        order += several
        flat = [masks[number].reshape(-1) for number in several]
        sums.append(_sums_of_words(flat, [shards[number].index.start or 0 for number in several]))
    found = torch.cat([each.view(-1).cpu() for each in sums]).tolist() if sums else []
    return [number for _, number in sorted(zip(order, found, strict=True))]


def _sums_of_words(flat: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """Of masks of whole words, int64 [masks]; ``starts``: where each begins in its parameter."""
    words = _packed(torch.cat(list(flat)))
    if len(flat) == 1:
        return _weighted(words[None], torch.tensor(starts) // _BITS).sum()
    sizes = torch.tensor([each.shape[0] for each in flat]) // _BITS
    of_mask = torch.arange(len(flat)).repeat_interleave(sizes)
    begins = torch.tensor(starts) // _BITS - sizes.cumsum(0) + sizes
    weighted = _weighted(words[:, None], torch.arange(words.shape[0]) + begins[of_mask])
    sums = torch.zeros(len(flat), dtype=torch.int64, device=words.device)
    return sums.index_add_(0, memory.moved(of_mask, words.device), weighted.view(-1))


def _weighted(words: Tensor, numbers: Tensor) -> Tensor:
    """Words, int64 [rows, n] on any device, times their weights.

    Args:
        words: changed.
        numbers: of the first word of each row, int64 [rows] on the host.
    """
    size, device = words.shape[1], words.device
    first, last = int(numbers.min()) >> _TABLE_LOG2, int(numbers.max()) + size - 1 >> _TABLE_LOG2
    # Each word has a weight in its table, times the table's own.
    weights, factors = _odd(0, _TABLE - 1, 3, device), _odd(first, last, 4, device)
    if first == last and len(numbers) == 1:  # a slice is read faster than an index
        start = int(numbers) % _TABLE
        return words.mul_(weights[start : start + size]).mul_(factors)
    numbers = memory.moved(numbers[:, None] + torch.arange(size), device)
    return words.mul_(weights[numbers % _TABLE]).mul_(factors[(numbers >> _TABLE_LOG2) - first])


def _words(index: IndexMap, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of words, int64, on the device of a flat mask, and the number of each row's first."""
    size, run, lead = flat.numel(), index.run or 1, 0
    block = _CPU_BLOCK if memory.takes_numpy(flat.device) else _DEVICE_BLOCK
    if index.start is not None:
        run, lead = block, index.start % block  # pieces end where tables do
    elif index.offset or size % run or ((index(torch.arange(0, size, run)) | run) % _BITS).any():
        run = 1  # not whole words
    step = max(1, block // run) * run
    first = 0
    while first < size:
        piece = flat[first : first + step - lead]
        numel = piece.shape[0]
        length = min(run, numel)
        starts = index(torch.arange(first, first + numel, length))
        first, lead = first + numel, 0
        shifts, numbers = starts % _BITS, starts // _BITS
        if length == 1:
            shifts = memory.moved(shifts, flat.device)
            yield (piece == 0).long()[:, None] << shifts[:, None], numbers
        else:  # the only row, or rows of whole words
            yield _packed(piece, int(shifts[0])).view(len(numbers), -1), numbers


def _packed(mask: Tensor, lead: int = 0) -> Tensor:
    """The zeros of a mask, 1-d, as bits of words, int64; the first bit is the lowest one.

    Args:
        lead: the bit of the first element.
    """
    trail = -(lead + mask.shape[0]) % _BITS
    if memory.takes_numpy(mask.device):
        bits = np.empty(lead + mask.shape[0] + trail, dtype=bool)
        bits[:lead] = bits[lead + mask.shape[0] :] = False
        memory.is_zero(mask, out=bits[lead : lead + mask.shape[0]])
        packed = torch.from_numpy(memory.pack(bits))
    else:
        flags = nn.functional.pad(mask == 0, (lead, trail))
        # The highest byte of each product has the lowest bits of the eight bytes of its factor.
        packed = ((flags.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)
    return packed.view(torch.int32).long() & 0xFFFFFFFF


@functools.lru_cache(maxsize=1 << 8)
def _odd(first: int, last: int, seed: int, device: torch.device) -> Tensor:
    """Odd pseudo-random int64, by their numbers."""
    return ((hash_keys(torch.arange(first, last + 1), seed) << 1) | 1).to(device)
