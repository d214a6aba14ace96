"""What this rank's part of a mask and of a weight amounts to, in a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.mask_values import is_one, is_zero
from distprune._common.memory import Array
from distprune.masks.fingerprint import fingerprint_part
from distprune.shards.checksum import checksums, of_shard
from distprune.shards.shard import LocalShard

# Elements at a time: what is made of them stays in the second-level cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 25


@dataclass
class Numbers:
    """This rank's part of one parameter.

    Attributes:
        num_held: elements.
        num_pruned: of these, under the mask.
        fingerprint: what the part adds to that of the whole mask.
        mask_hash, weight_hash: int64 that depend on the contents and on where in the parameter
            they are; equal where replicas are. None if the weight was not looked at.
        problems: what is wrong with the contents.
    """

    num_held: int
    num_pruned: int
    fingerprint: int
    mask_hash: int
    weight_hash: int | None
    problems: list[str] = field(default_factory=list)


def measure(shard: LocalShard, product: Tensor | None, *, compares_weight: bool) -> Numbers:
    """Read a shard once.

    Args:
        shard: with its mask.
        product: the masked weight that is there now, of the shard's shape; None if the product is
            made when it is needed.
        compares_weight: whether the weight has replicas.

    Cost: two reads of the mask, and one of the weight, or two if it has replicas.
    """
    mask, values = shard.mask, shard.values
    assert mask is not None
    num_pruned, num_kept, is_exposed = 0, 0, False
    flat_mask, flat_values = shard.flat(mask), shard.flat(values)
    flat_product = None if product is None else shard.flat(product.detach())
    for span in _chunks(flat_mask):
        pruned, zeros, ones = _zeros_and_ones(flat_mask[span])
        num_pruned += zeros
        num_kept += ones
        if flat_product is not None and not is_exposed:
            is_exposed = _any_nonzero(flat_product[span], pruned)
    problems = []
    if num_pruned + num_kept != mask.numel():
        problems.append(
            f"its mask is not binary: {mask.numel() - num_pruned - num_kept} of {mask.numel()} "
            "values are neither 0 nor 1"
        )
    if _is_infinite_under(flat_values, flat_mask):
        problems.append(
            "infinite or NaN values are under the mask, whose product with 0 is NaN and not 0"
        )
    elif is_exposed:
        problems.append(
            "the masked weight that is there now is not 0 where the mask is: it, or the mask, was "
            "written to after it had been computed"
        )
    fingerprint = int(fingerprint_part(shard, mask))
    weight_hash = of_shard(shard, checksums([values])[0]) if compares_weight else None
    mask_hash = of_shard(shard, fingerprint, num_pruned, num_kept)
    return Numbers(mask.numel(), num_pruned, fingerprint, mask_hash, weight_hash, problems)


def place_hash(shard: LocalShard) -> int:
    """Equal, and not 0, on ranks that hold the same elements."""
    return of_shard(shard) | 1


def _chunks(flat: Tensor, times: int = 1) -> Iterator[slice]:
    size = times * (_CPU_CHUNK if memory.takes_numpy(flat.device) else _DEVICE_CHUNK)
    for first in range(0, flat.numel(), size):
        yield slice(first, first + size)


def _zeros_and_ones(mask: Tensor) -> tuple[Array | Tensor, int, int]:
    """Which are 0, and how many are 0 and 1."""
    if not memory.takes_numpy(mask.device):
        zeros = mask == 0
        num_zeros = int(zeros.sum())
        is_bool = mask.dtype is torch.bool
        return zeros, num_zeros, mask.numel() - num_zeros if is_bool else int((mask == 1).sum())
    zeros = is_zero(mask)
    num_zeros = int(np.count_nonzero(zeros))
    if mask.dtype is torch.bool:
        return zeros, num_zeros, zeros.size - num_zeros
    return zeros, num_zeros, int(np.count_nonzero(is_one(mask)))


def _any_nonzero(values: Tensor, where: Array | Tensor) -> bool:
    # Not values.numpy(): FSDP could not free the storage of a gathered weight any more.
    is_nonzero = values != 0
    if isinstance(where, Tensor):
        return bool((is_nonzero & where).any())
    return bool(np.any(is_nonzero.numpy() & where))


def _is_infinite_under(values: Tensor, mask: Tensor) -> bool:
    """Whether a pruned value is infinite or NaN, which a sum that is finite rules out."""
    if not (values.is_floating_point() or values.is_complex()):
        return False
    for span in _chunks(values, 4):
        chunk = values[span]
        total = chunk.sum().item()
        if total - total != 0 and bool((~chunk.isfinite() & (mask[span] == 0)).any()):
            return True
    return False
