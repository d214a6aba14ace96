"""What is pruned in a model on this rank, and whether all that lets a mask act is there."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from distprune._common.naming import named_modules
from distprune._common.pruned_form import is_dtensor, mask_key, name_of_mask, orig_key
from distprune.masks import survival
from distprune.masks.hook import PruningHook, layout_of
from distprune.masks.record import Member
from distprune.shards.reader import ShardReader
from distprune.torch_private import live_property


@dataclass
class Place:
    """A parameter under one of its names.

    Attributes:
        path: its full name.
        hook: None if there is none any more.
        problems: what is wrong with it here.
        is_readable: whether the mask and the parameter are there, and fit each other.
    """

    path: str
    module: nn.Module
    name: str
    hook: PruningHook | None
    problems: list[str] = field(default_factory=list)
    is_readable: bool = True

    @property
    def original(self) -> Any:
        """What stands under the name of the unmasked parameter."""
        key = orig_key(self.name)
        registered = self.module._parameters.get(key)
        return self.module.__dict__.get(key) if registered is None else registered

    @property
    def mask(self) -> Any:
        """The buffer."""
        return self.module._buffers.get(mask_key(self.name))


def places_of(model: nn.Module, prefix: str = "") -> list[Place]:
    """Every place of the model that is pruned, or has a trace of a mask that is gone."""
    found = []
    for path, module in named_modules(model):
        path = ".".join(filter(None, (prefix, path)))
        for name in _traces(module):
            found.append(place(module, name, f"{path}.{name}" if path else name))
    return found


def place(module: nn.Module, name: str, path: str) -> Place:
    """One place, pruned or not."""
    hooks = _hooks(module, name)
    return Place(path, module, name, hooks[0] if hooks else None)


def is_traced(module: nn.Module, name: str) -> bool:
    """Whether a parameter is pruned, or has a trace of a mask that is gone."""
    return name in _traces(module)


def check(place: Place, reader: ShardReader, managed: Mapping[tuple[int, str], Any]) -> None:
    """Enter into a place whatever keeps its mask from acting.

    Args:
        managed: what wrappers have now, as wrappers.managed_parameters gives it.
    """
    module, name = place.module, place.name
    problems, original = place.problems, orig_key(name)
    hooks = _hooks(module, name)
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
    shard_mask = module.__dict__.get(live_property.shard_mask_key(name))
    if record is None and reader.managed(module, name) is not None:
        record = reader.managed(module, name)
    if record is not None:
        _check_managed(place, record, shard_mask)
    else:
        _check_unmanaged(place, shard_mask)


def _check_managed(place: Place, record: Any, shard_mask: Any) -> None:
    module, name, problems = place.module, place.name, place.problems
    original = orig_key(name)
    if shard_mask is None:
        problems.append(
            "it was wrapped after it had been pruned, and its mask is whole on every rank; call "
            "shard_masks(model) after wrapping"
        )
        place.is_readable = False
        return
    known = shard_mask.managed()
    if known is None or known.key != record.key:
        problems.append(
            "it was wrapped anew, and its mask acts on what the earlier wrapper had; call "
            "masks_aside(model) around the wrapping"
        )
        place.is_readable = False
        return
    expected = getattr(record, "sharded", None)
    if expected is not None and not is_dtensor(expected):
        problems.append(
            f"{original} was replaced by {_described(expected)}, which its wrapper cannot gather; "
            "load a state dict of DTensors, or without assign=True"
        )
        place.is_readable = False
        return
    if not shard_mask.is_attached():
        problems.append("its mask is not attached to the shard, which is gathered unmasked")
    if not live_property.is_live(module, name):
        problems.append(f"the class of the module was changed, so that {name} is not masked")
    if not record.has_registered(module, original):
        problems.append(f"{original} was replaced by a parameter that the wrapper does not have")
        place.is_readable = False
    problem = _layout_problem(record.values if expected is None else expected, place.mask)
    if problem is None and "bool" not in str(place.mask.dtype):
        problem = f"its mask has dtype {place.mask.dtype}; expected torch.bool under FSDP"
    if problem is not None:
        problems.append(problem)
        place.is_readable = False


def _check_unmanaged(place: Place, shard_mask: Any) -> None:
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
    is_live = live_property.is_live(module, name)
    if live_property.is_needed(module, name) and not is_live:
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
    """How a mask does not fit its parameter."""
    if is_dtensor(parameter) != is_dtensor(mask):
        return (
            f"its mask is {_described(mask)}, and the parameter {_described(parameter)}; expected "
            "the same layout"
        )
    if is_dtensor(parameter):
        same = (
            mask.device_mesh == parameter.device_mesh
            and tuple(mask.placements) == tuple(parameter.placements)
            and mask.shape == parameter.shape
            and mask.to_local().shape == parameter.to_local().shape
        )
    else:
        same = mask.shape == parameter.shape
    if not same or mask.device != parameter.device:
        return (
            f"its mask is {_described(mask)}, and the parameter {_described(parameter)}; expected "
            "the same layout"
        )
    return None


def _described(tensor: Tensor) -> str:
    kind = f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}"
    if not is_dtensor(tensor):
        return kind
    return (
        f"a DTensor of shape {tuple(tensor.shape)} with {tensor.placements} on a mesh of shape "
        f"{tuple(tensor.device_mesh.shape)}, {tuple(tensor.to_local().shape)} here"
    )


def dense_places(model: nn.Module, places: Iterable[Place], prefix: str = "") -> list[str]:
    """Where a pruned parameter is registered without its mask, in words with its name."""
    originals: dict[int, str] = {}
    known: set[tuple[int, str]] = set()
    for each in places:
        known.add((id(each.module), orig_key(each.name)))
        known.add((id(each.module), each.name))  # told of already
        if isinstance(each.original, nn.Parameter):
            originals.setdefault(id(each.original), each.path)
    found = []
    for path, module in named_modules(model):
        for name, parameter in module._parameters.items():
            pruned = originals.get(id(parameter))
            if pruned is not None and (id(module), name) not in known:
                where = ".".join(filter(None, (prefix, path, name)))
                found.append(f"{pruned}: it is registered as {where} too, and acts there unmasked")
    return found


def missing_members(model: nn.Module, places: Iterable[Place], *, forget: bool) -> list[str]:
    """Names of parameters that were pruned with others that are here, and are not pruned here.

    Those of another model, or of another part of it, are not missing.

    Args:
        forget: do not miss them any more.
    """
    places = list(places)
    held: dict[Member, Place] = {}
    for each in places:
        if each.hook is not None and each.hook.member is not None:
            held.setdefault(each.hook.member, each)
    names, has_collected = [], False
    dense: set[str] = set()
    for group in {id(member.group): member.group for member in held}.values():
        missing = [member for member in group if member not in held]
        if not missing:
            continue
        if not has_collected:
            gc.collect()  # modules and what is on them refer to each other
            has_collected = True
            dense = _parameter_paths(model) - {place.path for place in places}
        moves = [
            _moved(member.label, held[member].path)
            for member in group
            if member in held and member.is_full
        ]
        move = next((each for each in moves if each is not None), None)
        for member in missing:
            path: str | None = member.label
            if move is not None and member.is_full:
                path = move.path_of(member.label)
            if path is not None and (member.is_gone or (move is not None and path in dense)):
                names.append(path)
                if forget:
                    member.forget()
    return [] if forget else sorted(names)


def _parameter_paths(model: nn.Module) -> set[str]:
    """Full names of all parameters, in whatever form a wrapper has them."""
    return {
        f"{path}.{name}" if path else name
        for path, module in named_modules(model)
        for name in (*module._parameters, *module.__dict__)
    }


@dataclass(frozen=True)
class _Move:
    """How names at the time of pruning and names now differ: by what comes first."""

    before: str
    now: str

    def path_of(self, label: str) -> str | None:
        if not label.startswith(self.before):
            return None  # of another part of the model than this one
        return self.now + label.removeprefix(self.before)


def _moved(label: str, path: str) -> _Move | None:
    if label == path:
        return _Move("", "")
    if label.endswith("." + path):
        return _Move(label.removesuffix(path), "")
    if path.endswith("." + label):
        return _Move("", path.removesuffix(label))
    return None


def _traces(module: nn.Module) -> list[str]:
    names = {
        hook._tensor_name: None
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, PruningHook) and hasattr(hook, "_tensor_name")
    }
    for key in module._buffers:
        name = name_of_mask(key)
        if name is not None and _has_original(module, name) and not _is_of_torch(module, name):
            names[name] = None
    kept = getattr(module.__dict__.get(survival.KEY), "names", ())
    for name in sorted(kept):
        is_left = _has_original(module, name) or live_property.is_live(module, name)
        if is_left or live_property.shard_mask_key(name) in module.__dict__:
            names[name] = None
    return list(names)


def _has_original(module: nn.Module, name: str) -> bool:
    key = orig_key(name)
    return key in module._parameters or isinstance(module.__dict__.get(key), Tensor)


def _is_of_torch(module: nn.Module, name: str) -> bool:
    """Whether torch's own pruning has a hook there, which is none of this library's business."""
    return any(
        type(hook).__module__ == "torch.nn.utils.prune" and hook._tensor_name == name
        for hook in module._forward_pre_hooks.values()
    )


def _hooks(module: nn.Module, name: str) -> list[PruningHook]:
    return list(_hooks_of(module, name))


def _hooks_of(module: nn.Module, name: str) -> Iterator[PruningHook]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, PruningHook) and getattr(hook, "_tensor_name", None) == name:
            yield hook
