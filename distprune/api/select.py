"""``select``: which parameters of a model to prune, by name and type, on any wrapper."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from distprune._common.lost import lost_mask
from distprune._common.naming import NamedParameter, full_name, named_modules
from distprune._common.patterns import matcher
from distprune._common.pruned_form import mask_key, orig_key
from distprune.masks.hook import find_hook
from distprune.torch_private.wrapper import managed_parameters

# Pruning a normalisation's few scales saves nothing and hurts: out by default.
_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def select(
    model: nn.Module,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    types: type | tuple[type, ...] | None = None,
    names: str | Sequence[str] = ("weight",),
    *,
    prefix: str = "",
) -> list[NamedParameter]:
    """List the parameters of a model to prune.

    Args:
        model: plain or wrapped in anything that this library supports.
        include: patterns; only parameters that match one are taken. A pattern is a
            glob (``*``, ``?``, ``[...]``; ``*`` crosses dots) or, after ``re:``, a regular
            expression; it has to match the whole name of a module
            ("layers.0.mlp") or of a parameter ("layers.0.mlp.weight"), without the
            prefixes that wrappers add.
        exclude: patterns; parameters that match one are left out.
        types: take only modules of these types.
        names: which parameters of a module. Normalisation layers are left out
            unless ``include`` or ``types`` asks for them.
        prefix: where ``model`` is in a larger one ("layers.1"): put before all names. Pipeline
            stages need it when their own names do not tell them apart.

    Returns:
        (module, name) pairs, each with its full name as ``.fqn``, in the order in
        which the model registers its modules: the same on every rank and wrapper.
        A tied parameter is listed once, where it comes first, and is pruned under all its
        names; it is left out if ``exclude`` matches one of them. Parameters that are pruned
        already are listed like any other.

    Raises:
        ValueError: a pattern that matches nothing, or nothing is selected.
        RuntimeError: a parameter is pruned, and its mask was deleted.

    Cost: one walk over the modules; no communication.
    """
    include = None if include is None else _as_list("include", include)
    exclude = _as_list("exclude", exclude)
    names = _as_list("names", names)
    managed = managed_parameters(model)
    used: set[str] = set()
    fqns: list[str] = []
    groups: dict[Hashable, _Names] = {}
    for path, module in named_modules(model):
        path = ".".join(filter(None, (prefix, path)))
        for name in names:
            identity = _find(module, name, managed)
            if identity is None:
                continue
            key, ndim = identity
            fqn = full_name(path, name)
            fqns.append(fqn)
            group = groups.setdefault(key, _Names())
            group.places.append(NamedParameter(module, name, fqn))
            included = _matches(include or (), fqn, used)
            group.is_excluded |= _matches(exclude, fqn, used)
            if types is not None and not isinstance(module, types):
                continue
            if include is None and types is None:
                included = not isinstance(module, _NORMS) and not _looks_like_norm(module, ndim)
            elif include is None:
                included = True
            group.is_included |= included
    selected = [
        group.places[0].with_places(group.places)
        for group in groups.values()
        if group.is_included and not group.is_excluded
    ]
    unused = [pattern for pattern in (*(include or ()), *exclude) if pattern not in used]
    if unused:
        raise ValueError(
            f"{', '.join(map(repr, unused))} match no parameter; expected globs or 're:' patterns "
            f"for names such as {', '.join(fqns[:4]) or '(none)'}. {len(fqns)} parameters are "
            f"called {' or '.join(names)}."
        )
    if not selected:
        raise ValueError(
            f"nothing is selected: include={include}, exclude={exclude}, types={types}, "
            f"names={names}. Expected at least one of the {len(fqns)} parameters called "
            f"{' or '.join(names)}."
        )
    return selected


@dataclass
class _Names:
    """A parameter under all its names."""

    places: list[NamedParameter] = field(default_factory=list)
    is_included: bool = False
    is_excluded: bool = False


def _as_list(what: str, value: str | Iterable[str]) -> list[str]:
    values = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(item, str) for item in values):
        raise TypeError(f"{what}={value!r}; expected a string or a sequence of strings.")
    return values


def _find(
    module: nn.Module, name: str, managed: Mapping[tuple[int, str], Any]
) -> tuple[Hashable, int] | None:
    """What is the same for all names of a parameter, pruned or not, and its dimensions."""
    is_pruned = find_hook(module, name) is not None
    if is_pruned and module._buffers.get(mask_key(name)) is None:
        raise lost_mask(module, name)
    for registered in (name, orig_key(name)):
        if registered != name and mask_key(name) not in module._buffers:
            continue
        record = managed.get((id(module), registered))
        if record is not None:
            return record.key, len(record.shape)
        parameter = module._parameters.get(registered)
        if parameter is not None:
            return id(parameter), parameter.ndim
    return None


def _matches(patterns: Iterable[str], parameter: str, used: set[str]) -> bool:
    matching = [pattern for pattern in patterns if matcher(pattern)(parameter)]
    used.update(matching)
    return bool(matching)


def _looks_like_norm(module: nn.Module, ndim: int) -> bool:
    """Norms of other libraries (LlamaRMSNorm, ...) have 1-d parameters and say so in their name."""
    return "norm" in type(module).__name__.lower() and ndim <= 1
