"""Every parameter of a model with all its places."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from distprune.base.naming import NamedParameter, full_name, named_modules
from distprune.base.pruned_form import name_of_pruned_orig
from distprune.shards.factored import FactoredScores
from distprune.wrappers.wrapper import is_flat, is_flattened, managed_parameters

# By (module, name): a score per element, or the factors of all scores.
Scores = Mapping[tuple[nn.Module, str], Tensor | FactoredScores]


class Place(NamedTuple):
    """Where a model has a parameter.

    Attributes:
        key: the same for all places of a tied parameter.
        shape: of the whole parameter.
        pair: (module, name), with the plain full name.
        is_floating: whether the parameter is of real floating-point numbers.
    """

    key: Hashable
    shape: tuple[int, ...]
    pair: NamedParameter
    is_floating: bool

    def with_all(self, places: Iterable[Place]) -> NamedParameter:
        """The pair, with all places of its parameter."""
        return self.pair.with_places(place.pair for place in places)


def all_places(model: nn.Module) -> Iterator[Place]:
    """Every parameter at every place, in the order of registration."""
    managed, modules = managed_parameters(model), []
    for path, module in named_modules(model):
        own = {n: p for n, p in module._parameters.items() if p is not None and not is_flat(p)}
        modules.append((path, module, own))
    if any(
        (id(module), name) not in managed and is_flattened(module, name)
        for _, module, own in modules
        for name in own
    ):  # ``model`` is inside an FSDP1 module that was not seen yet
        managed = managed_parameters(everywhere=True)
    names_of: dict[int, list[str]] = {}
    for module_id, name in managed:
        names_of.setdefault(module_id, []).append(name)
    for path, module, own in modules:
        for name in dict.fromkeys([*own, *names_of.get(id(module), ())]):
            record = managed.get((id(module), name))
            key = id(own[name]) if record is None else record.key
            shape = (own[name] if record is None else record).shape
            plain = name_of_pruned_orig(name, module._buffers) or name
            pair = NamedParameter(module, plain, full_name(path, plain))
            is_floating = name not in own or own[name].is_floating_point()
            yield Place(key, tuple(shape), pair, is_floating)


def by_parameter(places: Iterable[Place]) -> dict[Hashable, list[Place]]:
    """The places of each parameter, by its key, in the order of their first ones."""
    found: dict[Hashable, list[Place]] = {}
    for place in places:
        found.setdefault(place.key, []).append(place)
    return found


def find_places(model: nn.Module, is_wanted: Callable[[Place], bool]) -> list[NamedParameter]:
    """Some parameters; a tied one once, with all its places."""
    return [
        next(filter(is_wanted, places)).with_all(places)
        for places in by_parameter(all_places(model)).values()
        if any(map(is_wanted, places))
    ]
