"""What one rank can find out alone: the entries of its pruned parameters, with their problems.

What the places of a parameter do not show, but only the whole model, is a parameter that is used
unmasked too, or not pruned any more.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from distprune._common import memory
from distprune._common.attempts import Failed, attempt
from distprune._common.collectives import Communicator
from distprune._common.naming import full_name, named_modules, registered_parameters
from distprune._common.pruned_form import is_dtensor, orig_key
from distprune.masks.fingerprint import fingerprint_parts
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
            if shard is not None:
                measured = attempt(_measure, entry, place, shard, communicator)
                if isinstance(measured, Failed):
                    entry.problems.append(_unreadable(measured))
            shard = None
        read.append((place, entry, shard))
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


# Elements at a time, so that temporaries stay in the second-level cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 16, 1 << 25


def _measure(
    entry: LocalEntry, place: Place, shard: LocalShard, communicator: Communicator
) -> None:
    """Count and hash a shard.

    Cost: two reads of the mask, and one of the weight, or two if it has replicas. Waits for a
    device after each chunk.
    """
    if shard.mask is None:
        entry.problems.append("its mask cannot be found")
        return
    mask, values, product = shard.flat(shard.mask), shard.flat(shard.values), _product(place, shard)
    flat_product = None if product is None else shard.flat(product.detach())
    num_pruned, num_kept, is_exposed = 0, 0, False
    for span in _chunks(mask):
        zeros = mask[span].logical_not()  # on a CPU a third of the time of a comparison
        num_zeros = _number(zeros)
        num_pruned += num_zeros
        if mask.dtype is torch.bool:
            num_kept += zeros.numel() - num_zeros
        else:
            num_kept += _number(mask[span] == 1)
        if flat_product is not None and not is_exposed:
            is_exposed = _number(zeros > flat_product[span].logical_not()) > 0
    has_infinite = _is_infinite_under(values, mask)
    fingerprint = fingerprint_parts([shard], [shard.mask])[0]
    is_on_part = shard.ranks is None or len(shard.ranks) < communicator.size
    if shard.num_replicas > 1 or (communicator.size > 1 and is_on_part):
        entry.weight_hash = of_shard(shard, checksums([shard.values])[0])
    num_others = mask.numel() - num_pruned - num_kept
    if num_others:
        entry.problems.append(
            f"its mask is not binary: {num_others} of {mask.numel()} values are neither 0 nor 1"
        )
    if has_infinite:
        entry.problems.append(
            "infinite or NaN values are under the mask, whose product with 0 is NaN and not 0"
        )
    elif is_exposed:
        entry.problems.append(
            "the masked weight that is there now is not 0 where the mask is: it, or the mask, "
            "was written to after it had been computed"
        )
    entry.shard, entry.num_pruned, entry.fingerprint = shard, num_pruned, fingerprint
    entry.mask_hash = of_shard(shard, fingerprint, num_pruned, num_kept)


def _number(flags: Tensor) -> int:
    if memory.takes_numpy(flags.device):
        return int(np.count_nonzero(flags.numpy()))
    return int(torch.count_nonzero(flags))


def _chunks(flat: Tensor, times: int = 1) -> Iterator[slice]:
    size = times * (_CPU_CHUNK if memory.takes_numpy(flat.device) else _DEVICE_CHUNK)
    for first in range(0, flat.numel(), size):
        yield slice(first, first + size)


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
