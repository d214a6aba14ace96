"""What one rank can find out alone: its pruned parameters, and what keeps their masks from acting.

A mask acts if the parameter, the mask, the hook and the record of the wrapper exist and fit
together. A :class:`Place` is a parameter under one of its names; an :class:`Inspected` a parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from distprune.base import memory
from distprune.base.naming import full_name
from distprune.base.pruned_form import is_dtensor, mask_key, name_of_mask, orig_key
from distprune.masks.fingerprint import fingerprint_parts
from distprune.masks.hook import PruningHook, holder_of, holds_zeros, hooks_on
from distprune.ranks.collectives import Communicator
from distprune.shards.checksum import at_position, checksums
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard
from distprune.wrappers import masked_value
from distprune.wrappers.held import find_held, held_names
from distprune.wrappers.managed import Managed, StoredRun
from distprune.wrappers.wrapper import is_managed, managed_parameters, may_be_managed

# Elements at a time, so that temporaries stay in the second-level cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 25


class Place:
    """A parameter under one of its names, as it is registered now.

    Attributes:
        path: full name of the parameter.
        hooks: its pruning hooks: one, unless something is wrong.
        is_held: whether the mask acts by zeros in shards, and the parameter has its own name.
        original: the attribute that should be the parameter; None if it was deleted.
        mask: the buffer that should be the mask; None if it was deleted.
    """

    def __init__(self, path: str, module: nn.Module, name: str) -> None:
        self.path, self.module, self.name = path, module, name
        self.hooks = [hook for hook in hooks_on(module) if hook._tensor_name == name]
        self.is_held = holds_zeros(module, name)
        self.key = name if self.is_held else orig_key(name)
        original: Any = module._parameters.get(self.key)
        self.original: Any = module.__dict__.get(self.key) if original is None else original
        self.mask: Any = module._buffers.get(mask_key(name))


@dataclass
class Inspected:
    """One parameter on this rank.

    Attributes:
        name: fully qualified.
        problems: what is wrong with the parameter on this rank.
        hook: of its first place.
        shard: this rank's part; None if it could not be read, and the numbers are 0 then.
        product: the masked weight that its first module keeps, 1-d, in the order of the shard.
        num_pruned: elements of the part that the mask prunes.
        fingerprint: the part's summand of the fingerprint of the whole mask.
        mask_hash, weight_hash: int64 that depend on the contents and on their position in the
            parameter; equal where replicas are. weight_hash is 0 if nobody has a replica.
    """

    name: str
    problems: list[str] = field(default_factory=list)
    hook: PruningHook | None = None
    shard: Shard | None = None
    product: Tensor | None = None
    num_pruned: int = 0
    fingerprint: int = 0
    mask_hash: int = 0
    weight_hash: int = 0


class _Broken(Exception):
    """The parameter cannot be read together with its mask; says why."""


def places_of(modules: Sequence[tuple[str, nn.Module]], prefix: str = "") -> list[Place]:
    """Every place of some modules that is pruned, or has a trace of a deleted mask."""
    prefix = prefix + "." if prefix else ""
    return [
        Place(prefix + full_name(path, name), module, name)
        for path, module in modules
        for name in traces(module)
    ]


def traces(module: nn.Module) -> list[str]:
    """Names of the parameters that have a hook, a mask or what pruning adds to a module."""
    names = dict.fromkeys(hook._tensor_name for hook in hooks_on(module))
    for key in module._buffers:
        name = name_of_mask(key)
        if name is not None and name not in names and _is_ours(module, name):
            names[name] = None
    return list(names | dict.fromkeys((*masked_value.live_names(module), *held_names(module))))


def _is_ours(module: nn.Module, name: str) -> bool:
    """Whether a buffer with a mask's name is one, and not of torch.nn.utils.prune."""
    for hook in module._forward_pre_hooks.values():
        is_of_torch = type(hook).__module__ == "torch.nn.utils.prune"
        if is_of_torch and getattr(hook, "_tensor_name", None) == name:
            return False
    if orig_key(name) in module._parameters or find_held(module, name) is not None:
        return True
    parameter, mask = module._parameters.get(name), module._buffers[mask_key(name)]
    return is_dtensor(parameter) and is_dtensor(mask) and mask.dtype is torch.bool


def inspect(places: Sequence[Place], communicator: Communicator) -> dict[str, Inspected]:
    """Check everything that the places of parameters show on this rank: by name."""
    reader, records = ShardReader(), managed_parameters() if may_be_managed() else None
    by_key: dict[Hashable, Inspected] = {}
    entries: dict[str, Inspected] = {}
    for place in places:
        problems: list[str] = []
        shard = None
        try:
            _check(place, reader, records, problems)
            shard = reader.read(place.module, place.name, place.path)
            if shard.mask is None:
                shard = None
                raise _Broken("its mask cannot be found")
        except _Broken as error:
            problems.append(str(error))
        except Exception as error:  # of any type: it is a problem of the parameter
            problems.append(f"cannot be read: {type(error).__name__}: {error}")
        key: Hashable = (id(place.module), place.name) if shard is None else shard.key
        entry = by_key.get(key)
        if entry is None:
            hook = place.hooks[0] if place.hooks else None
            product = None if shard is None else _product(place, shard)
            entry = by_key[key] = Inspected(place.path, [], hook, shard, product)
            entries.setdefault(place.path, entry)
        elif shard is not None and entry.shard is not None and not _same(entry.shard, shard):
            problems.append("it is tied, and has another mask than under its first name")
        prefix = "" if place.path == entry.name else f"as {place.path}, "
        entry.problems += [prefix + text for text in problems]
    _measure([entry for entry in entries.values() if entry.shard], communicator)
    return entries


def find_dense_places(
    modules: Sequence[tuple[str, nn.Module]],
    places: Sequence[Place],
    entries: Mapping[str, Inspected],
) -> None:
    """Add problems of pruned parameters that are also registered without their mask."""
    entry_of: dict[int, Inspected] = {}
    checked: set[tuple[int, str]] = set()  # (id of a module, name) pairs that are checked elsewhere
    for place in places:
        checked |= {(id(place.module), place.key), (id(place.module), place.name)}
        if isinstance(place.original, nn.Parameter) and place.path in entries:
            entry_of.setdefault(id(place.original), entries[place.path])
    for path, module in modules:
        for name, parameter in module._parameters.items():
            entry = entry_of.get(id(parameter))
            if entry is not None and (id(module), name) not in checked:
                fqn = full_name(path, name)
                entry.problems.append(f"it is registered as {fqn} too, and acts there unmasked")


def _check(
    place: Place,
    reader: ShardReader,
    records: Mapping[tuple[int, str], Managed] | None,
    problems: list[str],
) -> None:
    """Find everything that keeps a mask from acting.

    Raises:
        _Broken: the mask and the parameter do not exist or do not fit each other.
    """
    module, name, mask = place.module, place.name, place.mask
    if not place.hooks:
        problems.append("its pruning hook is gone, so that nothing keeps the mask acting")
    elif len(place.hooks) > 1:
        problems.append(f"it has {len(place.hooks)} pruning hooks; expected one")
    if not place.is_held:
        if module._parameters.get(name) is not None:
            problems.append(
                f"another parameter is registered as {name}, in the place of the masked one"
            )
        is_sharded = records is not None and is_managed(module, place.key)
        if is_sharded or is_dtensor(place.original):
            raise _Broken(
                "it was pruned before it was sharded, and its mask is whole; call "
                "masks_aside(model) around the wrapping"
            )
    record = None
    if records is not None:
        record = records.get((id(module), name)) or reader.managed(module, name)
    if record is None and not isinstance(place.original, Tensor):
        raise _Broken(f"{place.key} is gone")
    if not isinstance(mask, Tensor):
        raise _Broken(f"its mask, the buffer {mask_key(name)}, is gone")
    if place.is_held:
        _check_held(place, mask, record, problems)
        return
    _check_layout(mask, place.original)
    if masked_value.must_be_live(module) and not masked_value.is_live(module, name):
        problems.append(f"{name} is not computed when it is read, as it has to be here")


def _check_held(place: Place, mask: Tensor, record: Managed | None, problems: list[str]) -> None:
    held, parameter = holder_of(place.module, place.name), place.original
    if getattr(held.record, "key", None) != getattr(record, "key", None):
        raise _Broken(
            "it was wrapped anew, and its mask acts on what the earlier wrapper had; call "
            "masks_aside(model) around the wrapping"
        )
    if isinstance(record, StoredRun):
        parameter = record.values
    elif record is not None:
        parameter = record.parameter
        if not is_dtensor(parameter):
            raise _Broken(
                f"{place.name} was replaced by {_described(parameter)}, which its wrapper cannot "
                "gather; load a state dict of DTensors, or without assign=True"
            )
    if record is not None and not record.has_registered(place.module, place.name):
        raise _Broken(f"{place.name} was replaced by a parameter that the wrapper does not have")
    # With CPU offload FSDP1 moves buffers to the accelerator for good, and parameters for use.
    _check_layout(mask, parameter, may_be_elsewhere=record is not None)
    if mask.dtype is not torch.bool:
        raise _Broken(f"its mask has dtype {mask.dtype}; expected torch.bool on shards")
    for stored, part in held.stored():
        number = int((stored[part.to(stored.device) == 0] != 0).sum())
        if number:
            problems.append(f"{number} pruned elements are not zero in what the rank stores")


def _check_layout(mask: Tensor, parameter: Tensor, *, may_be_elsewhere: bool = False) -> None:
    """Raise if a mask is not laid out like its parameter; on its device, or on any."""
    fits = mask.shape == parameter.shape and is_dtensor(mask) == is_dtensor(parameter)
    if fits and is_dtensor(mask):
        of_mask, of_parameter = (
            (each.device_mesh, tuple(each.placements), each.to_local().shape)  # type: ignore[attr-defined]
            for each in (mask, parameter)
        )
        fits = of_mask == of_parameter
    if not fits or not (may_be_elsewhere or mask.device == parameter.device):
        raise _Broken(
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


def _product(place: Place, shard: Shard) -> Tensor | None:
    """The masked weight that the module keeps, 1-d, in the order of the shard.

    None if there is none: zeros are held, or it is computed when it is read or at the next forward.
    """
    product: Any = place.module.__dict__.get(place.name)
    values = shard.values
    # After .to() the product keeps the old device and dtype until the next forward.
    # FSDP1 leaves a view there, of memory that it may have freed.
    is_current = (
        isinstance(product, Tensor)
        and not place.is_held
        and (product.shape, product.dtype, product.device)
        == (values.shape, values.dtype, values.device)
        and not is_dtensor(product)
        and not masked_value.is_live(place.module, place.name)
    )
    return shard.flat(product.detach()) if is_current else None


def _same(shard: Shard, other: Shard) -> bool:
    """Whether two places of a tied parameter have the same mask."""
    mask, of_other = shard.mask, other.mask
    assert mask is not None and of_other is not None
    return mask is of_other or (
        mask.shape == of_other.shape and torch.equal(mask != 0, of_other != 0)
    )


def _measure(entries: Sequence[Inspected], communicator: Communicator) -> None:
    """Count and hash masks, and what is under them; the entries have shards.

    Cost: two reads of the mask, and one of the weight, or two if it has replicas. Waits for a
    device three times.
    """
    shards: list[Any] = [entry.shard for entry in entries]
    # Small parameters of a kind are looked at together.
    groups: dict[object, list[int]] = {}
    num_elements = 0
    for i, (shard, entry) in enumerate(zip(shards, entries, strict=True)):
        mask, values, size = shard.mask, shard.values, shard.flat_mask.shape[0]
        part = (num_elements := num_elements + size) >> 20  # temporaries of some megabytes
        kind = (mask.dtype, values.dtype, mask.device, values.device, entry.product is None, part)
        groups.setdefault(kind if size <= memory.SERIAL else i, []).append(i)
    counted = [
        _numbers([(shards[i].flat_mask, shards[i].flat_values, entries[i].product) for i in group])
        for group in groups.values()
    ]
    order = [i for group in groups.values() for i in group]
    rows = [row for array in memory.arrays_on_host(counted) for row in array.tolist()]
    copied = [i for i, shard in enumerate(shards) if _is_copied(shard, communicator)]
    sums = dict(zip(copied, checksums([shards[i].values for i in copied]), strict=True))
    fingerprints = fingerprint_parts(shards, [shard.mask for shard in shards])
    for i, (num_pruned, num_kept, num_infinite, num_exposed) in zip(order, rows, strict=True):
        entry, shard = entries[i], shards[i]
        num_elements = shard.flat_mask.shape[0]
        num_others = num_elements - num_pruned - num_kept
        if num_others:
            entry.problems.append(
                f"its mask is not binary: {num_others} of {num_elements} values are neither 0 nor 1"
            )
        if num_infinite:
            entry.problems.append(
                "infinite or NaN values are under the mask, whose product with 0 is NaN and not 0"
            )
        elif num_exposed:
            entry.problems.append(
                "the masked weight that is there now is not 0 where the mask is: it, or the mask, "
                "was written to after it had been computed"
            )
        entry.num_pruned, entry.fingerprint = num_pruned, fingerprints[i]
        if communicator.size > 1:
            entry.mask_hash = at_position(shard.position, fingerprints[i], num_pruned, num_kept)
        if i in sums:
            entry.weight_hash = at_position(shard.position, sums[i])


def _is_copied(shard: Shard, communicator: Communicator) -> bool:
    """Whether other ranks may have the same elements."""
    is_on_part = shard.ranks is None or len(shard.ranks) < communicator.size
    return communicator.size > 1 and (shard.num_replicas > 1 or is_on_part)


def _numbers(group: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> Tensor:
    """Of some parameters, how many elements are pruned, are kept, are infinite or NaN where they
    are pruned, and have a product other than 0 there: int64 [m, 4], on the device."""
    mask, values, product = group[0]
    sizes = [each.numel() for each, _, _ in group]
    if len(group) > 1:
        mask = torch.cat([each for each, _, _ in group])
        values = torch.cat([each for _, each, _ in group])
        if product is not None:
            product = torch.cat([each for _, _, each in group if each is not None])
    ends = torch.tensor(sizes).cumsum(0).to(mask.device)
    totals = torch.zeros(len(group), 4, dtype=torch.int64, device=mask.device)
    size = _CPU_CHUNK if memory.takes_numpy(mask.device) else _DEVICE_CHUNK
    for first in range(0, mask.numel(), size if len(group) == 1 else max(1, mask.numel())):
        span = slice(first, first + size) if len(group) == 1 else slice(None)
        pruned = mask[span] == 0
        flags = {0: pruned, 1: ~pruned if mask.dtype is torch.bool else mask[span] == 1}
        if values.is_floating_point() or values.is_complex():
            flags[2] = pruned > values[span].isfinite()
        if product is not None:
            flags[3] = pruned > product[span].logical_not()
        for column, each in flags.items():
            if len(group) == 1:
                totals[0, column] += each.count_nonzero()
            else:
                upto = nn.functional.pad(each.cumsum(0), (1, 0))[ends]
                totals[:, column] = upto.diff(prepend=upto.new_zeros(1))
    return totals
