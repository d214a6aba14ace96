"""What one rank can find out alone: the entries of its pruned parameters, with their problems."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distprune._common.attempts import Failed, attempt
from distprune._common.collectives import Communicator
from distprune._common.pruned_form import is_dtensor, orig_key
from distprune.masks.hook import PruningHook
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard
from distprune.torch_private import live_property
from distprune.torch_private.managed import Managed
from distprune.torch_private.wrapper import managed_parameters
from distprune.verification import structure
from distprune.verification.entries import LocalEntry
from distprune.verification.expectations import ExpectedParameter
from distprune.verification.measuring import measure
from distprune.verification.missing import dense_places, missing_members
from distprune.verification.places import Place


@dataclass
class LocalFindings:
    """What one rank found out.

    Attributes:
        entries: of the parameters that are pruned, or should be.
        hooks: (module, hook) of each parameter under all its names, by the name of its entry.
        problems: what is wrong with the model as a whole.
        expected: what has to be pruned.
        places: of the pruned parameters.
    """

    entries: list[LocalEntry] = field(default_factory=list)
    hooks: dict[str, list[tuple[nn.Module, PruningHook]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    expected: Sequence[ExpectedParameter] = ()
    places: Sequence[Place] = ()


def inspect(
    places: Sequence[Place],
    expected: Sequence[ExpectedParameter],
    communicator: Communicator,
    *,
    pipeline_parallel: bool,
    model: nn.Module | None = None,
    forget_missing: bool = False,
) -> LocalFindings:
    """Check everything that this rank can check alone.

    Args:
        places: the pruned parameters, from places.places_of.
        expected: what has to be pruned.
        communicator: the ranks that take part.
        pipeline_parallel: name the entries as they were named when they were pruned, so that
            stages can be joined.
        model: also checked as a whole; None if only its parameters are known.
        forget_missing: do not miss parameters of replaced modules again.
    """
    reader, managed = ShardReader(), managed_parameters(model)
    entries: dict[Hashable, LocalEntry] = {}
    findings = LocalFindings(expected=expected, places=places)
    names: set[str] = set()
    for place in places:
        shard = _read(place, reader, managed)
        key: Hashable = (id(place.module), place.name) if shard is None else shard.key
        entry = entries.get(key)
        if entry is None:
            name = _unique(_name_of(place, pipeline_parallel), names)
            entry = entries[key] = LocalEntry(name)
            if shard is not None:
                _measure(entry, place, shard, communicator)
        elif shard is not None:
            _compare_tied(entry, place, shard)
        if place.hook is not None:
            _add_hook(entry, place.module, place.hook, findings)
        prefix = "" if place.path == entry.name or pipeline_parallel else f"as {place.path}, "
        entry.problems += [prefix + text for text in place.problems]
    findings.entries = list(entries.values())
    absent: list[str] = []
    if model is not None:
        for name, text in dense_places(model, places):
            by_name = [entry for entry in findings.entries if entry.name == name]
            (by_name[0].problems if by_name else findings.problems).append(text)
        absent = missing_members(model, places, forget=forget_missing)
    _add_missing(findings, absent)
    return findings


def _read(
    place: Place, reader: ShardReader, managed: Mapping[tuple[int, str], Managed]
) -> LocalShard | None:
    """Check a place and read its shard; None, with the problem added, if that fails."""
    checked = attempt(structure.check, place, reader, managed)
    if isinstance(checked, Failed):
        place.problems.append(_unreadable(checked))
        return None
    if not place.is_readable:
        return None
    shard = attempt(reader.read, place.module, place.name, place.path)
    if isinstance(shard, Failed):
        place.problems.append(_unreadable(shard))
        return None
    return shard


def _unreadable(failed: Failed) -> str:
    return f"cannot be read: {type(failed.error).__name__}: {failed.error}"


def _add_hook(
    entry: LocalEntry, module: nn.Module, hook: PruningHook, findings: LocalFindings
) -> None:
    hooks = findings.hooks.setdefault(entry.name, [])
    if hooks and hook.record != entry.record:
        entry.problems.append("its hooks know of different last prunings of it")
    entry.record = hook.record
    hooks.append((module, hook))


def _name_of(place: Place, pipeline_parallel: bool) -> str:
    """The parameter's name; pipeline stages are joined by the names at the time of pruning."""
    member = None if place.hook is None else place.hook.member
    return member.label if pipeline_parallel and member and member.is_full else place.path


def _unique(name: str, names: set[str]) -> str:
    """The name, with a number if it is among ``names`` already; enters it there."""
    unique, number = name, 1
    while unique in names:
        number += 1
        unique = f"{name} ({number})"
    names.add(unique)
    return unique


def _measure(
    entry: LocalEntry, place: Place, shard: LocalShard, communicator: Communicator
) -> None:
    if shard.mask is None:
        entry.problems.append("its mask cannot be found")
        return
    is_on_part = shard.ranks is None or len(shard.ranks) < communicator.size
    has_replicas = shard.num_replicas > 1 or (communicator.size > 1 and is_on_part)
    product = _product(place, shard)
    numbers = attempt(lambda: measure(shard, product, compares_weight=has_replicas))
    if isinstance(numbers, Failed):
        entry.problems.append(_unreadable(numbers))
        return
    entry.shard, entry.numbers = shard, numbers
    entry.problems += numbers.problems


def _product(place: Place, shard: LocalShard) -> Tensor | None:
    """The masked weight that the module has now, shaped like the shard.

    None if there is none: it is computed when it is read, or at the next forward.
    """
    module, name = place.module, place.name
    if live_property.is_live(module, name):
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


def _add_missing(findings: LocalFindings, absent: Sequence[str]) -> None:
    """Add entries of parameters that should be pruned, and are not.

    Args:
        absent: parameters that were pruned together with others of the model.
    """
    text = "it was pruned together with others, and is not pruned any more"
    missing = dict.fromkeys(absent, text)
    paths = {place.path for place in findings.places}
    pairs = {(id(place.module), place.name) for place in findings.places}
    for parameter in findings.expected:
        if parameter.places is None:
            is_pruned = parameter.name in paths
        else:
            is_pruned = any((id(module), name) in pairs for module, name in parameter.places)
        if not is_pruned:
            missing.setdefault(parameter.name, "it is expected to be pruned, and is not")
    by_name = {entry.name: entry for entry in findings.entries}
    for name, text in missing.items():
        if name in by_name:
            by_name[name].problems.append(text)
        else:
            findings.entries.append(LocalEntry(name, problems=[text]))
