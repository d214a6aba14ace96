"""A checksum that tells replicas apart: of the bits of a tensor, in row-major order."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from distprune import memory
from distprune.keys import hash_keys

# 64-bit words in a block: they, their weights and the products stay in the second-level cache.
_WORDS = 1 << 14
# Blocks per operation of a device: 32 MiB.
_DEVICE_BLOCKS = 256


def checksums(locals_: Sequence[Tensor]) -> list[int]:
    """For each tensor an int64 that differs, as good as surely, between two of a shape and dtype.

    The sum, modulo 2**64, of all 64-bit words, each times an odd number that depends on where the
    word is: one word that differs always shows. How a tensor lies in memory, and on which
    device, makes no difference.

    Args:
        locals_: any shapes, dtypes and devices.

    Cost: one read, about as fast as memory; a copy of a tensor that is not contiguous. Waits for
    a device once.
    """
    sums = []
    for local in locals_:
        local = torch.view_as_real(local.detach()) if local.is_complex() else local.detach()
        flat = local.contiguous().view(-1)
        sums.append(_on_cpu(flat) if memory.takes_numpy(flat.device) else _anywhere(flat))
    of_blocks = _on_host(sums)
    totals = [
        sum(each * _block_weight(block) for block, each in enumerate(blocks))
        for blocks in of_blocks
    ]
    return [(total + 2**63) % 2**64 - 2**63 for total in totals]


def _on_cpu(flat: Tensor) -> list[int]:
    """The weighted sum of each block."""
    weights, products = _weights().numpy(), np.empty(_WORDS, np.int64)
    sums = []
    for words in _words(flat, _WORDS):
        size = words.numel()
        np.multiply(words.numpy(), weights[:size], out=products[:size])
        sums.append(int(np.add.reduce(products[:size])))
    return sums


def _anywhere(flat: Tensor) -> Tensor:
    """The same, int64 [blocks], many blocks per operation."""
    weights = _weights().to(flat.device)
    sums = [
        (nn.functional.pad(words, (0, -words.numel() % _WORDS)).view(-1, _WORDS) * weights).sum(1)
        for words in _words(flat, _WORDS * _DEVICE_BLOCKS)
    ]
    return torch.cat(sums) if sums else weights[:0]


def _on_host(sums: Sequence[list[int] | Tensor]) -> list[list[int]]:
    """What is on a device comes over together."""
    waiting = [each for each in sums if isinstance(each, Tensor)]
    arrived = iter(torch.cat(waiting).tolist() if waiting else [])
    return [
        [next(arrived) for _ in range(each.numel())] if isinstance(each, Tensor) else each
        for each in sums
    ]


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
