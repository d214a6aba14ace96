"""Every parameter of a model with all its places."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from distprune.base.naming import NamedParameter, full_name, named_modules
from distprune.base.pruned_form import name_of_pruned_orig
from distprune.shards.factored import FactoredScores
from distprune.wrappers.wrapper import is_flat, is_flattened, managed_parameters

# By (module, name): a score per element, or the factors of all scores.
Scores = Mapping[tuple[nn.Module, str], Tensor | FactoredScores]


@dataclass(frozen=True)
class Place:
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


def all_places(model: nn.Module) -> Iterable[Place]:
    """Every parameter at every place, in the order of registration."""
    managed = managed_parameters(model)
    modules = []
    for path, module in named_modules(model):
        own = {name: p for name, p in module._parameters.items() if p is not None}
        modules.append((path, module, {name: p for name, p in own.items() if not is_flat(p)}))
    if any(
        (id(module), name) not in managed and is_flattened(module, name)
        for _, module, registered in modules
        for name in registered
    ):  # ``model`` is inside an FSDP1 module that was not seen yet
        managed = managed_parameters(everywhere=True)
    names_of: dict[int, list[str]] = {}
    for module_id, name in managed:
        names_of.setdefault(module_id, []).append(name)
    for path, module, registered in modules:
        for name in dict.fromkeys([*registered, *names_of.get(id(module), ())]):
            record = managed.get((id(module), name))
            key = record.key if record is not None else id(registered[name])
            shape = record.shape if record is not None else registered[name].shape
            plain = name_of_pruned_orig(name, module._buffers) or name
            pair = NamedParameter(module, plain, full_name(path, plain))
            is_floating = name not in registered or registered[name].is_floating_point()
            yield Place(key, tuple(shape), pair, is_floating)


def by_parameter(places: Iterable[Place]) -> dict[Hashable, list[Place]]:
    """The places of each parameter, by its key, in the order of their first ones."""
    found: dict[Hashable, list[Place]] = {}
    for place in places:
        found.setdefault(place.key, []).append(place)
    return found


def find_places(model: nn.Module, is_wanted: Callable[[Place], bool]) -> list[NamedParameter]:
    """Some parameters; a tied one once, with all its places."""
    places = list(all_places(model))
    wanted, of_each = by_parameter(filter(is_wanted, places)), by_parameter(places)
    return [first.with_all(of_each[key]) for key, (first, *_) in wanted.items()]
