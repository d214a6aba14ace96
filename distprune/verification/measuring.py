"""What is measured of masks, and of the values and products under them.

On a CPU each is read by numpy. On a device Triton's kernels read all of them in a few launches,
where it compiles, and the host waits once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune._common import mask_kernels, memory
from distprune._common.attempts import Failed, attempt
from distprune._common.mask_values import is_one, is_zero
from distprune._common.memory import Array, lists_on_host
from distprune.masks.fingerprint import fingerprint_part, start_fingerprints
from distprune.shards.checksum import checksums
from distprune.shards.shard import LocalShard

# Elements at a time, so that temporaries stay in the second-level cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 25
# Elements whose masks, values and products are kept at a time on a device.
_DEVICE_BATCH = 1 << 28


@dataclass(frozen=True)
class Reading:
    """What is to be read of one parameter.

    Attributes:
        shard: with a mask.
        product: the masked weight that the module has now, shaped like the shard, if any.
        has_replicas: whether the weight is compared with others.
    """

    shard: LocalShard
    product: Tensor | None
    has_replicas: bool

    @property
    def mask(self) -> Tensor:
        """The mask of the shard."""
        assert self.shard.mask is not None
        return self.shard.mask

    def flats(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Mask, values and product, 1-d."""
        shard, product = self.shard, self.product
        flat_product = None if product is None else shard.flat(product.detach())
        return shard.flat(self.mask), shard.flat(shard.values), flat_product


@dataclass(frozen=True)
class Measured:
    """What was found in one shard.

    Attributes:
        num_pruned, num_kept: elements of the mask that are 0, and that are 1.
        has_infinite: whether values under the mask are infinite or NaN.
        is_exposed: whether the product is not 0 under the mask.
        fingerprint: of the part of the mask.
        checksum: of the values, if the weight has replicas; otherwise 0.
    """

    num_pruned: int
    num_kept: int
    has_infinite: bool
    is_exposed: bool
    fingerprint: int
    checksum: int


def measure(readings: Sequence[Reading]) -> list[Measured | Failed]:
    """Count and hash shards.

    Returns:
        For each, what was found, or what was raised if it cannot be read.

    Cost: two reads of the mask, and one of the weight, or two if it has replicas. Waits for a
    device once, or twice if weights have replicas.
    """
    found: dict[int, Measured | Failed] = {}
    on_devices: list[int] = []
    for position, reading in enumerate(readings):
        if memory.takes_numpy(reading.mask.device):
            found[position] = attempt(_measured, reading)
        else:
            on_devices.append(position)
    together = attempt(_measured_on_devices, [readings[position] for position in on_devices])
    for number, position in enumerate(on_devices):
        if not isinstance(together, Failed):
            found[position] = together[number]
            continue
        # Which of them cannot be read shows when each is read alone.
        alone = attempt(_measured_on_devices, [readings[position]])
        found[position] = alone if isinstance(alone, Failed) else alone[0]
    return [found[position] for position in range(len(readings))]


def _measured(reading: Reading) -> Measured:
    """By numpy."""
    num_pruned, num_kept, is_exposed = 0, 0, False
    flat_mask, flat_values, flat_product = reading.flats()
    for span in _chunks(flat_mask):
        zeros = is_zero(flat_mask[span])
        num_zeros = int(np.count_nonzero(zeros))
        num_pruned += num_zeros
        if flat_mask.dtype is torch.bool:
            num_kept += zeros.size - num_zeros
        else:
            num_kept += int(np.count_nonzero(is_one(flat_mask[span])))
        if flat_product is not None and not is_exposed:
            is_exposed = _any_nonzero(flat_product[span], zeros)
    return Measured(
        num_pruned,
        num_kept,
        _is_infinite_under(flat_values, flat_mask),
        is_exposed,
        int(fingerprint_part(reading.shard, reading.mask)),
        checksums([reading.shard.values])[0] if reading.has_replicas else 0,
    )


def _measured_on_devices(readings: Sequence[Reading]) -> list[Measured]:
    """By Triton's kernels or by torch's operations, without waiting in between."""
    started = start_fingerprints([r.shard for r in readings], [r.mask for r in readings])
    counted = list(_counts(readings))
    vectors = [*started.vectors, *(vector for _, vector in counted)]
    numbers = lists_on_host(vectors)
    fingerprints = started.finish(numbers[: len(started.vectors)])
    counts: dict[int, list[int]] = {}
    for (positions, _), row in zip(counted, numbers[len(started.vectors) :], strict=True):
        for i, position in enumerate(positions):
            counts[position] = row[4 * i : 4 * i + 4]
    sums = iter(checksums([reading.shard.values for reading in readings if reading.has_replicas]))
    found = []
    for position, reading in enumerate(readings):
        zeros, ones, infinite, exposed = counts[position]
        checksum = next(sums) if reading.has_replicas else 0
        found.append(
            Measured(zeros, ones, infinite > 0, exposed > 0, fingerprints[position], checksum)
        )
    return found


def _counts(readings: Sequence[Reading]) -> Iterator[tuple[list[int], Tensor]]:
    """(positions, int64 [4 * positions] on their device), as triton_masks.count counts."""
    of_devices: dict[torch.device, ModuleType | None] = {}
    pending: dict[torch.device, dict[int, Any]] = {}
    room = _DEVICE_BATCH
    for position, reading in enumerate(readings):
        device = reading.mask.device
        if device not in of_devices:
            of_devices[device] = mask_kernels.mask_kernels_on(device)
        kernels = of_devices[device]
        mask, values, product = reading.flats()
        if kernels is None or not _can_be_read(kernels, mask, values, product):
            yield [position], _counts_by_operations(mask, values, product)
            continue
        tensors = (mask, values if values.is_floating_point() else None, product)
        read = kernels.MaskRead(*(None if each is None else each.contiguous() for each in tensors))
        pending.setdefault(device, {})[position] = read
        room -= mask.numel()
        if room < 0:  # flat views may be copies
            yield from _counts_by_triton(pending)
            pending, room = {}, _DEVICE_BATCH
    yield from _counts_by_triton(pending)


def _can_be_read(kernels: ModuleType, *tensors: Tensor | None) -> bool:
    """Whether kernels take tensors of one size on one device; others are left to operations,
    which raise an error."""
    kinds = {(each.numel(), each.device) for each in tensors if each is not None}
    return len(kinds) == 1 and kernels.takes(*tensors)


def _counts_by_triton(
    pending: Mapping[torch.device, Mapping[int, Any]],
) -> Iterator[tuple[list[int], Tensor]]:
    for device, reads in pending.items():
        kernels = mask_kernels.mask_kernels_on(device)
        assert kernels is not None
        yield [*reads], kernels.count([*reads.values()], device).view(-1)


def _counts_by_operations(mask: Tensor, values: Tensor, product: Tensor | None) -> Tensor:
    totals = torch.zeros(4, dtype=torch.int64, device=mask.device)
    has_infinite = values.is_floating_point() or values.is_complex()
    for span in _chunks(mask):
        pruned = mask[span] == 0
        zeros = torch.count_nonzero(pruned)
        is_bool = mask.dtype is torch.bool
        ones = pruned.numel() - zeros if is_bool else torch.count_nonzero(mask[span] == 1)
        infinite = exposed = torch.zeros_like(zeros)
        if has_infinite:
            infinite = torch.count_nonzero(values[span].isfinite().logical_not_() & pruned)
        if product is not None:
            exposed = torch.count_nonzero(pruned > product[span].logical_not())
        totals += torch.stack([zeros, ones, infinite, exposed])
    return totals


def _chunks(flat: Tensor, times: int = 1) -> Iterator[slice]:
    size = times * (_CPU_CHUNK if memory.takes_numpy(flat.device) else _DEVICE_CHUNK)
    for first in range(0, flat.numel(), size):
        yield slice(first, first + size)


def _any_nonzero(values: Tensor, where: Array) -> bool:
    # Not values.numpy(): FSDP could not free the storage of a gathered weight any more.
    is_zero = values.logical_not()  # half the time of a comparison
    return bool(np.any(np.greater(where, is_zero.numpy())))


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
