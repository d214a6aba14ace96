"""What only the whole model shows: parameters that are used unmasked, or not pruned any more."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from distprune._common.naming import full_name, named_modules
from distprune._common.pruned_form import orig_key
from distprune.masks.record import Member
from distprune.verification.places import Place


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

    Args:
        forget: remove them from their groups, so that later calls do not miss them.
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
