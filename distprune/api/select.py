"""``select``: which parameters of a model to prune, on any wrapper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from distprune.base import selecting
from distprune.base.naming import NamedParameter, full_name, unwrap
from distprune.masks.hook import check_state, hooks_on
from distprune.shards.reader import Place, all_places, by_parameter

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def select(
    model: nn.Module,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    types: type | tuple[type, ...] | None = None,
    names: str | Sequence[str] | None = None,
    *,
    also: str | Sequence[str] = (),
    min_ndim: int | None = None,
    everything: bool = False,
    prefix: str = "",
) -> list[NamedParameter]:
    """List the parameters of a model to prune.

    By default these are the parameters that ``distprune prune`` selects in a checkpoint of the
    same model: matrices and convolutions, experts in one parameter of three dimensions among them,
    but no embedding, output head, norm, router, bias, or table of positions. Names of modules and
    parameters decide, and so do the types of embeddings and norms, and the head that a model of
    transformers reports.

    Args:
        model: plain or wrapped in anything that this library supports.
        include: patterns; the matrices that match one are taken instead of the default. A pattern
            is a glob (``*``, ``?``, ``[...]``; ``*`` crosses dots) or, after ``re:``, a regular
            expression; it has to match the whole name of a module
            ("layers.0.mlp") or of a parameter ("layers.0.mlp.weight"), without the
            prefixes that wrappers add.
        exclude: patterns; parameters that match one are left out.
        types: take only modules of these types.
        names: take only parameters that modules register under these names; all by default.
            Biases need ``everything=True``, or ``include`` and ``min_ndim=1``.
        also: patterns; the matrices that match one are taken besides the default.
        min_ndim: leave out parameters with fewer dimensions larger than 1, also if a pattern names
            them; 2 by default.
        everything: take every parameter called "weight", or as ``names`` says, of any shape, and
            not only what is pruned by default. Norms are left out unless ``include`` or ``types``
            asks for them.
        prefix: where ``model`` is in a larger one ("layers.1"): put before all names. Pipeline
            stages need it when their own names do not tell them apart.

    Returns:
        (module, name) pairs, each with its full name as ``.fqn``, in the order in
        which the model registers its modules: the same on every rank and wrapper.
        A tied parameter is listed once, where it comes first, and is pruned under all its
        names; it is left out if ``exclude`` matches one of them, or if it is left out by default
        under one of them. Parameters that are pruned already are listed like any other.

    Raises:
        ValueError: a pattern that matches nothing, arguments that exclude each other, or nothing
            is selected.
        RuntimeError: a parameter is pruned, and its mask was deleted.

    Cost: one walk over the modules; no communication.
    """
    wanted = None if include is None else _as_list("include", include)
    unwanted, added = _as_list("exclude", exclude), _as_list("also", also)
    if (added and (everything or wanted is not None)) or (everything and min_ndim is not None):
        raise ValueError(
            f"also={added}, min_ndim={min_ndim} beside include={wanted}, everything={everything}; "
            "expected also without the other two, and min_ndim without everything."
        )
    own_names = ["weight"] if everything else None
    if names is not None:
        own_names = _as_list("names", names)
    parameters = by_parameter(_places(model, own_names, prefix)).values()
    fqns = [place.pair.fqn for places in parameters for place in places]
    matched = {}
    for pattern in [*(wanted or ()), *added, *unwanted]:
        matched[pattern] = set(filter(selecting.matcher(pattern), fqns))
        if not matched[pattern]:
            raise ValueError(
                f"{pattern!r} matches no parameter; expected a glob or a 're:' pattern for the "
                f"{len(fqns)} names such as {', '.join(fqns[:4]) or '(none)'}."
            )
    head = head_of(model)

    def reason_of(places: Sequence[Place]) -> str:
        """Why a parameter with these names is left out; "" if it is taken."""

        def is_in(patterns: Iterable[str]) -> bool:
            return any(place.pair.fqn in matched[p] for p in patterns for place in places)

        if (
            is_in(unwanted)
            or (wanted is not None and not is_in(wanted))
            or (types is not None and not any(isinstance(p.pair[0], types) for p in places))
        ):
            return "not asked for"
        if everything:
            is_asked_for = wanted is not None or types is not None
            return selecting.NORM if not is_asked_for and any(map(_is_norm, places)) else ""
        least = selecting.MIN_NDIM if min_ndim is None else min_ndim
        reason = selecting.reason_of_shape(places[0].shape, least)
        if reason or wanted is not None or is_in(added):
            return reason
        return next(filter(None, (_default_reason(place, head) for place in places)), "")

    reasons = [reason_of(places) for places in parameters]
    pairs = zip(parameters, reasons, strict=True)
    selected = [places[0].with_all(places) for places, reason in pairs if not reason]
    useless = set[str]()
    if own_names is not None and not everything:
        taken = {name for pair in selected for _, name in pair.places}
        useless = {p.pair[1] for places in parameters for p in places} - taken
    if useless or not selected:
        called = "".join(f" called {name!r}" for name in sorted(useless))
        why = "; ".join(sorted({reason for reason in reasons if reason})) or "there are none"
        raise ValueError(
            f"nothing{called} is selected in this {type(unwrap(model)).__name__}: its parameters "
            f"are left out ({why}). include takes what is left out by default, min_ndim=1 vectors, "
            "and everything=True any weight."
        )
    return selected


def head_of(model: nn.Module) -> nn.Module | None:
    """The layer that makes logits; None if the model does not say which."""
    get: Any = getattr(unwrap(model), "get_output_embeddings", None)
    return None if get is None else get()


def _default_reason(place: Place, head: nn.Module | None) -> str:
    """By type, where the module has one that tells more than names do; else by name."""
    module = place.pair[0]
    if isinstance(module, _EMBEDDINGS):
        return selecting.EMBEDDING
    if module is head:
        return selecting.HEAD
    if _is_norm(place):
        return selecting.NORM
    if not place.is_floating:
        return "no float"
    return selecting.reason_to_keep(place.pair.fqn, place.shape)


def _is_norm(place: Place) -> bool:
    """Norms of other libraries (LlamaRMSNorm, ...) have 1-d parameters and say so in their name."""
    module = place.pair[0]
    is_named_norm = "norm" in type(module).__name__.lower() and len(place.shape) <= 1
    return isinstance(module, _NORMS) or is_named_norm


def _as_list(what: str, value: str | Iterable[str]) -> list[str]:
    values = [value] if isinstance(value, str) else list(dict.fromkeys(value))
    if not all(isinstance(item, str) for item in values):
        raise TypeError(f"{what}={value!r}; expected a string or a sequence of strings.")
    return values


def _places(model: nn.Module, names: list[str] | None, prefix: str) -> Iterator[Place]:
    """All parameters of some names, those of a module in an order that no wrapper changes."""
    by_module: dict[int, dict[str, Place]] = {}
    for place in all_places(model):
        by_module.setdefault(id(place.pair[0]), {})[place.pair[1]] = place
    for places in by_module.values():
        module, _ = next(iter(places.values())).pair
        for hook in hooks_on(module):
            check_state(module, hook._tensor_name)
        for name in sorted(places) if names is None else names:
            if name in places:
                fqn = full_name(prefix, places[name].pair.fqn)
                yield places[name]._replace(pair=NamedParameter(module, name, fqn))
