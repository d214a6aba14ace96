"""Do replicas agree? A checksum of the bits of a tensor, and a comparison over ranks.

[Note: folded words] A word times an odd weight shows every word that differs. But the highest bit
of a word times any odd weight is the same, so that two words could exchange their signs, or two
elements of a bool mask their values, without a trace. So the upper half of a word is first
added, without carry, to the lower one: then 33 random bits of a weight meet every bit of a word.

[Note: no differences cancel] A sum over ranks of their checksums does not show whether
replicas are equal: w + d and w - d cancel, and so do two shards that a replica has exchanged. So
the checksum of a shard is hashed together with the position of the shard in the parameter, and
the hashes are summed: the replicas of each shard add the same number, or the sum is wrong.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from distprune.base import memory
from distprune.base.memory import hash_keys

# 64-bit words in a block: they, their weights and the products stay in the second-level cache.
_WORDS = 1 << 14
# Blocks per operation of a device: 32 MiB.
_DEVICE_BLOCKS = 256


def checksums(locals_: Sequence[Tensor]) -> list[int]:
    """An int64 per tensor, almost surely different for different tensors of a shape and dtype.

    The sum, modulo 2**64, of all 64-bit words, folded, times odd numbers that depend on their
    positions: a single word that differs always changes it. The strides and the device of a tensor
    make no difference. See [Note: folded words].

    Args:
        locals_: any shapes, dtypes and devices.

    Cost: one read, about as fast as memory; a copy of a tensor that is not contiguous. Waits for
    a device once.
    """
    # What a device has is asked for at the end, all at once.
    sums = [_sums(local.detach()) for local in locals_]
    copied = iter(memory.arrays_on_host([s for s in sums if isinstance(s, Tensor)]))
    totals = []
    for blocks in sums:
        numbers = next(copied).tolist() if isinstance(blocks, Tensor) else blocks
        totals.append(sum(number * _block_weight(i) for i, number in enumerate(numbers)))
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


def at_position(position: Hashable, *parts: int) -> int:
    """Checksums of a rank's part of a parameter, hashed with the position of the part; an int64.

    See [Note: no differences cancel].

    Args:
        position: of the part; see :attr:`shard.Shard.position`.
        parts: checksums, or other int64, that are equal on replicas of the shard.
    """
    data = repr(position).encode() + struct.pack(f"<{len(parts)}q", *parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def replicas_agree(num_replicas: int, of_all: int, of_first: int) -> bool:
    """Whether the replicas of every shard are equal.

    Args:
        num_replicas: of each shard.
        of_all: the sum, modulo 2**64, of :func:`at_position` over all ranks.
        of_first: the same over the ranks of replica 0.
    """
    return (num_replicas * of_first - of_all) % 2**64 == 0


def _sums(local: Tensor) -> list[int] | Tensor:
    """The weighted sum of each block: on a CPU numbers, else int64 [blocks]."""
    flat = (torch.view_as_real(local) if local.is_complex() else local).contiguous().view(-1)
    if memory.takes_numpy(flat.device):
        factors, numbers = _weights().numpy().view(np.uint64), []
        for words in _words(flat, _WORDS):
            word = words.numpy().view(np.uint64)
            folded = word >> np.uint64(32)
            folded ^= word
            folded *= factors[: folded.size]
            numbers.append(int(np.add.reduce(folded.view(np.int64))))
        return numbers
    weights, sums = _weights().to(flat.device), []
    for words in _words(flat, _WORDS * _DEVICE_BLOCKS):
        on_device = words ^ ((words >> 32) & 0xFFFFFFFF)
        padded = nn.functional.pad(on_device, (0, -on_device.numel() % _WORDS))
        sums.append((padded.view(-1, _WORDS) * weights).sum(1))
    return torch.cat(sums) if sums else weights[:0]


def _words(flat: Tensor, size: int) -> Iterator[Tensor]:
    """A contiguous tensor as int64 [<= size]; its end is filled up with zeros."""
    step = size * 8 // flat.itemsize
    for start in range(0, flat.numel(), step):
        raw = flat[start : start + step].view(torch.uint8)
        if raw.numel() % 8 or raw.data_ptr() % 8:
            filled = raw.new_zeros(-(-raw.numel() // 8) * 8)
            filled[: raw.numel()].copy_(raw)
            raw = filled
        yield raw.view(torch.int64)


@functools.cache
def _weights() -> Tensor:
    """Odd int64 [_WORDS] that look random."""
    return hash_keys(torch.arange(_WORDS), seed=1) | 1


@functools.lru_cache(maxsize=1 << 12)
def _block_weight(block: int) -> int:
    return int(hash_keys(torch.tensor([block]), seed=2)) | 1
