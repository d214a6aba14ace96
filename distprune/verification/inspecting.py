"""What one rank can find out alone: the entries of its pruned parameters, with their problems.

What the places of a parameter do not show, but only the whole model, is a parameter that is used
unmasked too, or not pruned any more. Masks, and the values and products under them, are measured:
on a CPU each by numpy; on a device Triton's kernels read all of them in a few launches, where it
compiles, and the host waits once.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distprune._common import mask_kernels, memory
from distprune._common.attempts import Failed, attempt
from distprune._common.collectives import Communicator
from distprune._common.mask_values import is_one, is_zero
from distprune._common.memory import Array, lists_on_host
from distprune._common.naming import full_name, named_modules, registered_parameters
from distprune._common.pruned_form import is_dtensor, orig_key
from distprune.masks.fingerprint import fingerprint_part, start_fingerprints
from distprune.masks.hook import PruningHook
from distprune.masks.record import MaskRecord, Member
from distprune.shards.checksum import checksums, of_shard
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard
from distprune.torch_private import masked_value
from distprune.torch_private.managed import Managed
from distprune.torch_private.wrapper import managed_parameters
from distprune.verification.places import Place, check


@dataclass
class LocalEntry:
    """One parameter on this rank.

    Attributes:
        name: fully qualified.
        hooks: those of the parameter under all its names.
        problems: what is wrong with the parameter on this rank.
        shard: this rank's part; None if it could not be read, and the numbers are 0 then.
        num_pruned: elements of the part that the mask prunes.
        fingerprint: the part's summand of the fingerprint of the whole mask.
        mask_hash, weight_hash: int64 that depend on the contents and on their position in the
            parameter; equal where replicas are. weight_hash is 0 if nobody has a replica.
    """

    name: str
    hooks: list[PruningHook] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    shard: LocalShard | None = None
    num_pruned: int = 0
    fingerprint: int = 0
    mask_hash: int = 0
    weight_hash: int = 0

    @property
    def record(self) -> MaskRecord | None:
        """The mask that the last pruning left; None if unknown."""
        return self.hooks[-1].record if self.hooks else None

    def add_hook(self, hook: PruningHook) -> None:
        """Add the hook of one more name of the parameter."""
        if self.hooks and hook.record != self.record:
            self.problems.append("its hooks know of different last prunings of it")
        self.hooks.append(hook)

    def add(self, reading: Reading, found: Measured) -> None:
        """Add what was found in a shard."""
        shard = reading.shard
        num_elements = reading.mask.numel()
        num_others = num_elements - found.num_pruned - found.num_kept
        if num_others:
            self.problems.append(
                f"its mask is not binary: {num_others} of {num_elements} values are neither 0 nor 1"
            )
        if found.has_infinite:
            self.problems.append(
                "infinite or NaN values are under the mask, whose product with 0 is NaN and not 0"
            )
        elif found.is_exposed:
            self.problems.append(
                "the masked weight that is there now is not 0 where the mask is: it, or the mask, "
                "was written to after it had been computed"
            )
        self.fingerprint = found.fingerprint
        self.mask_hash = of_shard(shard, found.fingerprint, found.num_pruned, found.num_kept)
        self.weight_hash = of_shard(shard, found.checksum) if reading.has_replicas else 0
        self.shard, self.num_pruned = shard, found.num_pruned


@dataclass
class LocalFindings:
    """What one rank found out.

    Attributes:
        places: of the pruned parameters.
        entries: by name, those of the parameters that are pruned, or should be.
        problems: what is wrong with the model as a whole.
    """

    places: Sequence[Place]
    entries: dict[str, LocalEntry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def inspect(
    places: Sequence[Place], communicator: Communicator, *, uses_pruned_names: bool
) -> LocalFindings:
    """Check everything that the places of parameters show on this rank.

    Args:
        uses_pruned_names: call parameters by their names at the time of the pruning, by which
            pipeline stages are joined.
    """
    reader, managed = ShardReader(), managed_parameters()
    by_key: dict[Hashable, LocalEntry] = {}
    findings = LocalFindings(places)
    readings: list[tuple[LocalEntry, Reading]] = []
    # The shard of a place is compared if another place of the parameter was read before.
    read: list[tuple[Place, LocalEntry, LocalShard | None]] = []
    for place in places:
        shard = _read(place, reader, managed)
        key: Hashable = (id(place.module), place.name) if shard is None else shard.key
        entry = by_key.get(key)
        if entry is None:
            member = None if place.hook is None else place.hook.member
            name = place.path
            if uses_pruned_names and member is not None and member.is_full:
                name = member.label
            name = _unique(name, findings.entries)
            entry = by_key[key] = findings.entries[name] = LocalEntry(name)
            reading = None if shard is None else _reading(entry, place, shard, communicator)
            if reading is not None:
                readings.append((entry, reading))
            shard = None
        read.append((place, entry, shard))
    found = measure([reading for _, reading in readings])
    for (entry, reading), measured in zip(readings, found, strict=True):
        if isinstance(measured, Failed):
            entry.problems.append(_unreadable(measured))
        else:
            entry.add(reading, measured)
    for place, entry, tied in read:
        if tied is not None:
            _compare_tied(entry, place, tied)
        if place.hook is not None:
            entry.add_hook(place.hook)
        prefix = "" if place.path == entry.name or uses_pruned_names else f"as {place.path}, "
        entry.problems += [prefix + text for text in place.problems]
    return findings


def _read(
    place: Place, reader: ShardReader, managed: Mapping[tuple[int, str], Managed]
) -> LocalShard | None:
    """Check a place and read its shard; None, with the problem added, if that fails."""

    def read() -> LocalShard | None:
        check(place, reader, managed)
        if not place.is_readable:
            return None
        return reader.read(place.module, place.name, place.path)

    shard = attempt(read)
    if isinstance(shard, Failed):
        place.problems.append(_unreadable(shard))
        return None
    return shard


def _unreadable(failed: Failed) -> str:
    return f"cannot be read: {type(failed.error).__name__}: {failed.error}"


def _unique(name: str, names: Mapping[str, object]) -> str:
    """The name, with a number if it is among ``names`` already."""
    unique, number = name, 1
    while unique in names:
        number += 1
        unique = f"{name} ({number})"
    return unique


def _reading(
    entry: LocalEntry, place: Place, shard: LocalShard, communicator: Communicator
) -> Reading | None:
    """What to measure; None, with the problem added, if there is no mask."""
    if shard.mask is None:
        entry.problems.append("its mask cannot be found")
        return None
    is_on_part = shard.ranks is None or len(shard.ranks) < communicator.size
    has_replicas = shard.num_replicas > 1 or (communicator.size > 1 and is_on_part)
    return Reading(shard, _product(place, shard), has_replicas)


def _product(place: Place, shard: LocalShard) -> Tensor | None:
    """The masked weight that the module has now, shaped like the shard.

    None if there is none: it is computed when it is read, or at the next forward.
    """
    module, name = place.module, place.name
    if masked_value.is_live(module, name):
        gathered = module._parameters.get(orig_key(name))
        is_gathered = type(gathered) is nn.Parameter and shard.mesh is not None
        if not is_gathered or gathered is None or gathered.shape != shard.shape:
            return None
        return shard.slice_of(gathered.detach())
    product = module.__dict__.get(name)
    # After .to() the product keeps the old device and dtype until the next forward.
    is_current = (
        isinstance(product, Tensor)
        and product.shape == shard.values.shape
        and product.dtype == shard.values.dtype
        and product.device == shard.values.device
        and not is_dtensor(product)
    )
    return product if is_current else None


def _compare_tied(entry: LocalEntry, place: Place, shard: LocalShard) -> None:
    first = None if entry.shard is None else entry.shard.mask
    if first is None or shard.mask is None or first is shard.mask:
        return
    if first.shape != shard.mask.shape or not torch.equal(first != 0, shard.mask != 0):
        place.problems.append("it is tied, and has another mask than under its first name")


def find_dense_places(model: nn.Module, findings: LocalFindings) -> None:
    """Add problems of pruned parameters that are also registered without their mask."""
    path_of_original: dict[int, str] = {}
    checked: set[tuple[int, str]] = set()  # (id of a module, name) pairs that are checked elsewhere
    for place in findings.places:
        checked |= {(id(place.module), orig_key(place.name)), (id(place.module), place.name)}
        if isinstance(place.original, nn.Parameter):
            path_of_original.setdefault(id(place.original), place.path)
    for fqn, module, name, parameter in registered_parameters(model):
        pruned_path = path_of_original.get(id(parameter))
        if pruned_path is None or (id(module), name) in checked:
            continue
        text = f"it is registered as {fqn} too, and acts there unmasked"
        entry = findings.entries.get(pruned_path)
        (findings.problems if entry is None else entry.problems).append(text)


def missing_members(model: nn.Module, places: Sequence[Place], *, forget: bool) -> list[str]:
    """Names of parameters that were pruned together with others of this model, and are not now.

    Parameters of another model, or of another part of it, are not missing.

    Args:
        forget: do not miss them from now on; the list is empty.
    """
    path_of: dict[Member, str] = {}
    for place in places:
        if place.hook is not None and place.hook.member is not None:
            path_of.setdefault(place.hook.member, place.path)
    groups = {id(member.group): member.group for member in path_of}.values()
    if all(member in path_of for group in groups for member in group):
        return []
    gc.collect()  # modules and their hooks are reference cycles
    # FSDP1 keeps some parameters as plain attributes.
    dense = {
        full_name(path, name)
        for path, module in named_modules(model)
        for name in (*module._parameters, *module.__dict__)
    } - {place.path for place in places}
    names = []
    for group in groups:
        prefixes = [
            _prefixes(member.label, path_of[member])
            for member in group
            if member in path_of and member.is_full
        ]
        known = next((pair for pair in prefixes if pair is not None), None)
        for member in group - path_of.keys():
            path = member.label
            if known is not None and member.is_full:
                old, new = known
                if not path.startswith(old):
                    continue  # in another part of the model
                path = new + path.removeprefix(old)
            if member.is_gone or (known is not None and path in dense):
                names.append(path)
                if forget:
                    member.forget()
    return [] if forget else sorted(names)


def _prefixes(label: str, path: str) -> tuple[str, str] | None:
    """The prefix that names had when they were pruned, and the one that they have now."""
    if label == path:
        return "", ""
    if label.endswith("." + path):
        return label.removesuffix(path), ""
    if path.endswith("." + label):
        return "", path.removesuffix(label)
    return None


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
