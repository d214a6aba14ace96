"""One parameter with its counts and hashes, as this rank sees it and as all ranks see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.mask_values import is_one, is_zero
from distprune._common.memory import Array
from distprune.masks.record import MaskRecord, fingerprint_part
from distprune.shards.checksum import checksums, of_shard
from distprune.shards.shard import LocalShard
from distprune.verification.report import VerifiedParameter

# Elements at a time, so that temporaries stay in the second-level cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 25


@dataclass
class Numbers:
    """This rank's part of one parameter.

    Attributes:
        num_elements: of the part.
        num_pruned: elements of the part that the mask prunes.
        fingerprint: the part's summand of the fingerprint of the whole mask.
        mask_hash, weight_hash: int64 that depend on the contents and on their position in the
            parameter; equal where replicas are. weight_hash is None if it was not computed.
        problems: what is wrong with the contents.
    """

    num_elements: int
    num_pruned: int
    fingerprint: int
    mask_hash: int
    weight_hash: int | None
    problems: list[str] = field(default_factory=list)


def measure(shard: LocalShard, product: Tensor | None, *, compares_weight: bool) -> Numbers:
    """Count and hash a shard.

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


def region_hash(shard: LocalShard) -> int:
    """Equal, and not 0, on ranks that have the same elements of the parameter."""
    return of_shard(shard) | 1


def _chunks(flat: Tensor, times: int = 1) -> Iterator[slice]:
    size = times * (_CPU_CHUNK if memory.takes_numpy(flat.device) else _DEVICE_CHUNK)
    for first in range(0, flat.numel(), size):
        yield slice(first, first + size)


def _zeros_and_ones(mask: Tensor) -> tuple[Array | Tensor, int, int]:
    """Where a mask is 0, and how many of its values are 0 and 1."""
    if not memory.takes_numpy(mask.device):
        is_pruned = mask == 0
        num_pruned = int(is_pruned.sum())
        is_bool = mask.dtype is torch.bool
        num_kept = mask.numel() - num_pruned if is_bool else int((mask == 1).sum())
        return is_pruned, num_pruned, num_kept
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
    """Whether a pruned value is infinite or NaN; a finite sum shows quickly that none is."""
    if not (values.is_floating_point() or values.is_complex()):
        return False
    for span in _chunks(values, 4):
        chunk = values[span]
        total = chunk.sum().item()
        if total - total != 0 and bool((~chunk.isfinite() & (mask[span] == 0)).any()):
            return True
    return False


@dataclass
class LocalEntry:
    """One parameter on this rank.

    Attributes:
        name: fully qualified.
        shard, numbers: None if the parameter could not be read on this rank.
        record: the mask that the last pruning left; None if unknown.
        problems: what is wrong with the parameter on this rank.
    """

    name: str
    shard: LocalShard | None = None
    numbers: Numbers | None = None
    record: MaskRecord | None = None
    problems: list[str] = field(default_factory=list)


@dataclass
class SharedEntry:
    """One parameter over all ranks; the same on every rank.

    Attributes:
        problems: all but ``record_problem``.
        record_problem: says that the mask is not the one that the last pruning left.
    """

    name: str
    num_elements: int = 0
    num_pruned: int = 0
    fingerprint: int = 0
    problems: list[str] = field(default_factory=list)
    record_problem: str | None = None

    def to_report(self) -> VerifiedParameter:
        """The entry of the report."""
        problems = [*self.problems, *([self.record_problem] if self.record_problem else [])]
        return VerifiedParameter(
            self.name, self.num_elements, self.num_pruned, self.fingerprint, tuple(problems)
        )
