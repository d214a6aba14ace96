"""Fingerprints: one integer for a whole mask, the same on any sharding.

The pruned elements of a whole parameter, in row-major order, are a string of bits. It is divided
into words of 32 bits, and the fingerprint is the sum of word * weight(position of the word), modulo
2**64. Each rank sums its own bits of every word, so that the sum over all shards is the
fingerprint, whatever the shards are. Runs of elements are packed into words, 32 at a time; where a
shard has shorter ones, each element is a word of one bit:

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

from distprune.base import mask_bits, memory
from distprune.base.hashing import hash_keys
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
    parts = [_part(*pair) for pair in zip(shards, masks, strict=True)]
    return [number for (number,) in memory.lists_on_host([part.view(1) for part in parts])]


def _part(shard: Shard, mask: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=mask.device)
    for words, numbers in _words(shard, shard.flat(mask.detach())):
        first, last = int(numbers.min()) >> _TABLE_LOG2, int(numbers.max()) >> _TABLE_LOG2
        factors = memory.moved(_odd(torch.arange(first, last + 1), 4), mask.device)
        numbers = memory.moved(numbers, mask.device)
        weights = _table(mask.device)[numbers & ((1 << _TABLE_LOG2) - 1)]
        total += (words * weights.mul_(factors[(numbers >> _TABLE_LOG2) - first])).sum()
    return total


def _words(shard: Shard, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Words, int64 [r, n], on the device of a flat mask, and their numbers, on the host."""
    size, index, run = flat.numel(), shard.index, 1
    block = _CPU_BLOCK if memory.takes_numpy(flat.device) else _DEVICE_BLOCK
    if size and index.start is None and not index.offset and not size % index.run:
        starts = index(torch.arange(0, size, index.run))
        run = 1 if index.run % _BITS or (starts % _BITS).any() else index.run
    step = max(1, block // run) * run
    for first in range(0, size, step):
        pruned = flat[first : first + step] == 0
        if index.start is not None:
            lead = (index.start + first) % _BITS
            starts = torch.tensor([index.start + first])
            pruned = nn.functional.pad(pruned, (lead, -(lead + pruned.numel()) % _BITS))
        else:
            starts = index(torch.arange(first, first + pruned.numel(), run))
            if run == 1:
                bits = memory.moved(starts % _BITS, flat.device)
                yield pruned.long() << bits, starts // _BITS
                continue
        words = _packed(pruned.view(len(starts), -1))
        yield words, (starts // _BITS).unsqueeze(1) + torch.arange(words.shape[1])


def _packed(pruned: Tensor) -> Tensor:
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
