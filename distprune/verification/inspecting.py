"""What one rank can find out alone: the entries of its pruned parameters, with their problems.

A mask acts if the parameter, the mask, the hook and the record of the wrapper exist and fit
together. What only the whole model shows is a parameter that is used unmasked, or not pruned any
more.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distprune._common.attempts import Failed, attempt
from distprune._common.collectives import Communicator
from distprune._common.naming import full_name, named_modules
from distprune._common.pruned_form import is_dtensor, mask_key, orig_key
from distprune.masks.hook import PruningHook, layout_of
from distprune.masks.record import Member
from distprune.shards.reader import ShardReader
from distprune.shards.shard import LocalShard
from distprune.torch_private import masked_value
from distprune.torch_private.managed import Managed, ManagedDTensor, ManagedRun, ShardMask
from distprune.torch_private.wrapper import managed_parameters
from distprune.verification.entries import LocalEntry, measure
from distprune.verification.expectations import ExpectedParameter
from distprune.verification.places import Place, hooks_of


def check(place: Place, reader: ShardReader, managed: Mapping[tuple[int, str], Managed]) -> None:
    """Add to a place's problems everything that keeps its mask from acting."""
    module, name = place.module, place.name
    problems, original = place.problems, orig_key(name)
    hooks = hooks_of(module, name)
    if not hooks:
        problems.append("its pruning hook is gone, so that nothing keeps the mask acting")
    elif len(hooks) > 1:
        problems.append(f"it has {len(hooks)} pruning hooks; expected one")
    if module._parameters.get(name) is not None:
        problems.append(
            f"another parameter is registered as {name}, in the place of the masked one"
        )
    if not isinstance(place.original, Tensor):
        problems.append(f"{original} is gone")
        place.is_readable = False
    if not isinstance(place.mask, Tensor):
        problems.append(f"its mask, the buffer {mask_key(name)}, is gone")
        place.is_readable = False
    if not place.is_readable:
        return
    record = managed.get((id(module), original), managed.get((id(module), name)))
    shard_mask = module.__dict__.get(masked_value.shard_mask_key(name))
    if record is None:
        record = reader.managed(module, name)
    if record is not None:
        _check_managed(place, record, shard_mask)
    else:
        _check_unmanaged(place, shard_mask)


def _check_managed(place: Place, record: Managed, shard_mask: ShardMask | None) -> None:
    module, name, problems = place.module, place.name, place.problems
    original = orig_key(name)
    if shard_mask is None:
        problems.append(
            "it was wrapped after it had been pruned, and its mask is whole on every rank; call "
            "shard_masks(model) after wrapping"
        )
        place.is_readable = False
        return
    masked_record = shard_mask.managed()
    if masked_record is None or masked_record.key != record.key:
        problems.append(
            "it was wrapped anew, and its mask acts on what the earlier wrapper had; call "
            "masks_aside(model) around the wrapping"
        )
        place.is_readable = False
        return
    replacement = record.plain_replacement if isinstance(record, ManagedDTensor) else None
    if replacement is not None:
        problems.append(
            f"{original} was replaced by {_described(replacement)}, which its wrapper cannot "
            "gather; load a state dict of DTensors, or without assign=True"
        )
        place.is_readable = False
        return
    if not shard_mask.is_attached():
        problems.append("its mask is not attached to the shard, which is gathered unmasked")
    if not masked_value.is_live(module, name):
        problems.append(f"the class of the module was changed, so that {name} is not masked")
    if not record.has_registered(module, original):
        problems.append(f"{original} was replaced by a parameter that the wrapper does not have")
        place.is_readable = False
    problem = _layout_problem(_parameter_of(record), place.mask)
    if problem is None and "bool" not in str(place.mask.dtype):
        problem = f"its mask has dtype {place.mask.dtype}; expected torch.bool under FSDP"
    if problem is not None:
        problems.append(problem)
        place.is_readable = False


def _parameter_of(record: Managed) -> Tensor:
    """The unmasked parameter in the form that the wrapper shards: a DTensor or a run."""
    if isinstance(record, ManagedDTensor):
        return record.sharded
    assert isinstance(record, ManagedRun)
    return record.values


def _check_unmanaged(place: Place, shard_mask: ShardMask | None) -> None:
    module, name, problems = place.module, place.name, place.problems
    original, parameter = orig_key(name), place.original
    if shard_mask is not None:
        problems.append("the FSDP wrapper that its mask acted in does not have it any more")
        place.is_readable = False
        return
    problem = _layout_problem(parameter, place.mask)
    if problem is not None:
        problems.append(problem)
        place.is_readable = False
    is_live = masked_value.is_live(module, name)
    if masked_value.must_be_live(module, name) and not is_live:
        problems.append(f"{name} is not computed when it is read, as it has to be here")
    hook = place.hook
    if hook is None or hook.layout is None:
        return
    if layout_of(parameter) != hook.layout:
        problems.append(
            f"{original} has the layout: {layout_of(parameter)}; it was pruned as: {hook.layout}"
        )
    elif hook.is_another(parameter):
        problems.append(f"{original} was replaced by another parameter than the one pruned")


def _layout_problem(parameter: Tensor, mask: Tensor) -> str | None:
    """A problem if a mask is not laid out like its parameter."""
    fits = mask.shape == parameter.shape and mask.device == parameter.device
    if is_dtensor(mask) and is_dtensor(parameter):
        fits = (
            fits
            and mask.device_mesh == parameter.device_mesh
            and tuple(mask.placements) == tuple(parameter.placements)
            and mask.to_local().shape == parameter.to_local().shape
        )
    else:
        fits = fits and not is_dtensor(mask) and not is_dtensor(parameter)
    if fits:
        return None
    return (
        f"its mask is {_described(mask)}, and the parameter {_described(parameter)}; expected "
        "the same layout"
    )


def _described(tensor: Tensor) -> str:
    kind = f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}"
    if not is_dtensor(tensor):
        return kind
    return (
        f"a DTensor of shape {tuple(tensor.shape)} with {tensor.placements} on a mesh of shape "
        f"{tuple(tensor.device_mesh.shape)}, {tuple(tensor.to_local().shape)} here"
    )


def dense_places(model: nn.Module, places: Iterable[Place]) -> list[tuple[str, str]]:
    """Pruned parameters that are also registered without their mask: (name, problem) pairs."""
    path_of_original: dict[int, str] = {}
    checked: set[tuple[int, str]] = set()  # (id of a module, name) pairs that are checked elsewhere
    for place in places:
        checked |= {(id(place.module), orig_key(place.name)), (id(place.module), place.name)}
        if isinstance(place.original, nn.Parameter):
            path_of_original.setdefault(id(place.original), place.path)
    problems = []
    for path, module in named_modules(model):
        for name, parameter in module._parameters.items():
            pruned_path = path_of_original.get(id(parameter))
            if pruned_path is not None and (id(module), name) not in checked:
                dense_path = full_name(path, name)
                text = f"it is registered as {dense_path} too, and acts there unmasked"
                problems.append((pruned_path, text))
    return problems


def missing_members(model: nn.Module, places: Iterable[Place], *, forget: bool) -> list[str]:
    """Names of parameters that were pruned together with others of this model, and are not now.

    Parameters of another model, or of another part of it, are not missing.
    """
    places = list(places)
    place_by_member: dict[Member, Place] = {}
    for place in places:
        if place.hook is not None and place.hook.member is not None:
            place_by_member.setdefault(place.hook.member, place)
    names, has_collected = [], False
    dense: set[str] = set()
    for group in {id(member.group): member.group for member in place_by_member}.values():
        missing = [member for member in group if member not in place_by_member]
        if not missing:
            continue
        if not has_collected:
            gc.collect()  # modules and their hooks are reference cycles
            has_collected = True
            dense = _parameter_paths(model) - {place.path for place in places}
        renamings = [
            _renaming(member.label, place_by_member[member].path)
            for member in group
            if member in place_by_member and member.is_full
        ]
        renaming = next((entry for entry in renamings if entry is not None), None)
        for member in missing:
            path: str | None = member.label
            if renaming is not None and member.is_full:
                path = renaming.path_of(member.label)
            if path is not None and (member.is_gone or (renaming is not None and path in dense)):
                names.append(path)
                if forget:
                    member.forget()
    return [] if forget else sorted(names)


def _parameter_paths(model: nn.Module) -> set[str]:
    """Full names of all parameters; FSDP1 keeps some of them as plain attributes."""
    return {
        full_name(path, name)
        for path, module in named_modules(model)
        for name in (*module._parameters, *module.__dict__)
    }


@dataclass(frozen=True)
class _Renaming:
    """The prefix that names had when they were pruned, and the prefix that they have now."""

    old_prefix: str
    new_prefix: str

    def path_of(self, label: str) -> str | None:
        if not label.startswith(self.old_prefix):
            return None  # in another part of the model
        return self.new_prefix + label.removeprefix(self.old_prefix)


def _renaming(label: str, path: str) -> _Renaming | None:
    if label == path:
        return _Renaming("", "")
    if label.endswith("." + path):
        return _Renaming(label.removesuffix(path), "")
    if path.endswith("." + label):
        return _Renaming("", path.removesuffix(label))
    return None


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
    """Check everything that this rank can check alone."""
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
    checked = attempt(check, place, reader, managed)
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


def _add_missing(findings: LocalFindings, absent: Sequence[str]) -> None:
    """Add entries of parameters that should be pruned, and are not."""
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
