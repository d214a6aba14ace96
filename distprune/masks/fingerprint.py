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

import torch
from torch import Tensor, nn

from distprune.base import memory
from distprune.base.memory import hash_keys
from distprune.shards.geometry import IndexMap
from distprune.shards.shard import Shard

_BITS = 32  # of a word
_TABLE_LOG2 = 15  # log2 of the words whose weights are looked up in one table
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
            kind = mask.dtype, mask.device
            if kind not in joined:
                joined[kind] = []
            joined[kind].append(number)
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
    words = _packed(torch.cat(list(flat)) == 0)
    if len(flat) == 1:
        return _weighted(words, torch.arange(words.shape[0]) + starts[0] // _BITS).sum()
    sizes = torch.tensor([each.shape[0] for each in flat]) // _BITS
    of_mask = torch.arange(len(flat)).repeat_interleave(sizes)
    begins = torch.tensor(starts) // _BITS - sizes.cumsum(0) + sizes
    weighted = _weighted(words, torch.arange(words.shape[0]) + begins[of_mask])
    sums = torch.zeros(len(flat), dtype=torch.int64, device=words.device)
    return sums.index_add_(0, memory.moved(of_mask, words.device), weighted)


def _weighted(words: Tensor, numbers: Tensor) -> Tensor:
    """Words, int64 on any device, times their weights; their numbers are int64 on the host."""
    first, last = int(numbers.min()) >> _TABLE_LOG2, int(numbers.max()) >> _TABLE_LOG2
    numbers = memory.moved(numbers, words.device)
    # Each word has a weight in its table, times the table's own.
    weights = _odd(0, (1 << _TABLE_LOG2) - 1, 3, words.device)[numbers % (1 << _TABLE_LOG2)]
    factors = _odd(first, last, 4, words.device)
    return weights.mul_(factors[(numbers >> _TABLE_LOG2) - first]).mul_(words)


def _words(index: IndexMap, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Words, int64, on the device of a flat mask, and their numbers, on the host."""
    size, run = flat.numel(), index.run or 1
    block = _CPU_BLOCK if memory.takes_numpy(flat.device) else _DEVICE_BLOCK
    if index.start is not None:
        run = max(1, min(size, block))
    elif index.offset or size % run or ((index(torch.arange(0, size, run)) | run) % _BITS).any():
        run = 1  # not whole words
    step = max(1, block // run) * run
    for first in range(0, size, step):
        pruned = flat[first : first + step] == 0
        numel = pruned.numel()
        run = min(run, numel)
        starts = index(torch.arange(first, first + numel, run))
        lead, numbers = starts % _BITS, starts // _BITS
        if run == 1:
            yield pruned.long() << memory.moved(lead, flat.device), numbers
            continue
        if run == numel:  # else they are whole words
            pruned = nn.functional.pad(pruned, (int(lead), -(int(lead) + run) % _BITS))
        words = _packed(pruned).view(len(numbers), -1)
        yield words, numbers.unsqueeze(1) + torch.arange(words.shape[1])


def _packed(pruned: Tensor) -> Tensor:
    """Bits, bool [32 n], as words, int64 [n]; the first bit is the lowest one."""
    if memory.takes_numpy(pruned.device):
        packed = torch.from_numpy(memory.pack(pruned.numpy()))
    else:
        # The highest byte of each product has the lowest bits of the eight bytes of its factor.
        packed = ((pruned.view(torch.int64) * 0x0102040810204080) >> 56).to(torch.uint8)
    return packed.view(torch.int32).long() & 0xFFFFFFFF


@functools.lru_cache(maxsize=1 << 8)
def _odd(first: int, last: int, seed: int, device: torch.device) -> Tensor:
    """Odd pseudo-random int64, by their numbers."""
    return ((hash_keys(torch.arange(first, last + 1), seed) << 1) | 1).to(device)
