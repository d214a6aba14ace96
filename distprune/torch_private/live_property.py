"""A property in place of ``module.weight``, where a value set before forward is not enough.

- Under FSDP the registered parameter is swapped between shard and gathered copy
  all the time; ``weight`` has to follow.
- ``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``,
  so no hook on ``out_proj`` ever runs.

The module gets a subclass of its class, made once per class and set of names, as
``torch.nn.utils.parametrize`` does. Every other module keeps its class.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from distprune._common.pruned_form import is_dtensor, mask_key, orig_key
from distprune.torch_private import dense_gradients
from distprune.torch_private.managed import ShardMask

_NAMES = "_distprune_live_names"
_BASE = "_distprune_base"


def is_live(module: nn.Module, name: str) -> bool:
    """Whether ``module.<name>`` is computed at each access."""
    return name in getattr(type(module), _NAMES, ())


def is_needed(module: nn.Module, name: str) -> bool:
    """Whether ``module.<name>``, pruned outside FSDP2, has to be computed at each access."""
    is_read_by_parent = isinstance(module, NonDynamicallyQuantizableLinear)
    return is_read_by_parent or is_dtensor(module._parameters[orig_key(name)])


def shard_mask_key(name: str) -> str:
    """Attribute of a module under which a wrapper's ShardMask is kept."""
    return f"_distprune_{name}_shard_mask"


def install(module: nn.Module, name: str) -> None:
    """Compute ``module.<name>`` from now on."""
    names = {*getattr(type(module), _NAMES, ()), name}
    module.__dict__.pop(name, None)  # a value that an earlier hook had set
    module.__class__ = _live_class(base_class(module), tuple(sorted(names)))


def uninstall(module: nn.Module, name: str) -> None:
    """Undo :meth:`install`; the class is the original one after the last name."""
    names = {*getattr(type(module), _NAMES, ())} - {name}
    base = base_class(module)
    module.__class__ = _live_class(base, tuple(sorted(names))) if names else base


def masked_value(module: nn.Module, name: str) -> Tensor:
    """The parameter as the mask leaves it, in whatever state a wrapper has it."""
    shard_mask: ShardMask | None = module.__dict__.get(shard_mask_key(name))
    if shard_mask is not None:
        return shard_mask.value(module, name)
    original = module._parameters[orig_key(name)]
    mask = module._buffers[mask_key(name)]
    assert original is not None and mask is not None
    return dense_gradients.product(module, name, original, mask)


def base_class(module: nn.Module) -> type:
    """The class of a module before :func:`install`."""
    base: type = getattr(type(module), _BASE, type(module))
    return base


@functools.cache
def _live_class(base: type, names: tuple[str, ...]) -> type:
    attributes: dict[str, Any] = {
        _NAMES: names,
        _BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
    }
    attributes |= {name: _live_value(name) for name in names}
    if hasattr(base, "_orig_cls_mro_index"):
        from distprune.torch_private import fsdp2

        attributes |= fsdp2.subclass_attributes(base)
    return type(base.__name__, (base,), attributes)


@functools.cache
def _live_value(name: str) -> property:
    """One for all classes: a list of experts may have hundreds of names."""

    def get(module: nn.Module) -> Tensor:
        return masked_value(module, name)

    return property(get, _refuse)


def _refuse(module: nn.Module, value: Any) -> None:
    raise AttributeError(
        f"a pruned parameter of {type(module).__name__} cannot be assigned to; change "
        f"{orig_key('<name>')} in place, or remove() the pruning first."
    )


def _reduce(module: nn.Module, protocol: int) -> Any:
    """Pickle and deepcopy through the original class: the generated one cannot be imported."""
    own_state = getattr(module, "__getstate__", None)
    state = module.__dict__ if own_state is None else own_state()
    if state is module.__dict__:
        state = dict(state)
    return _restore, (base_class(module), getattr(type(module), _NAMES)), state


def _restore(base: type, names: tuple[str, ...]) -> nn.Module:
    module: nn.Module = object.__new__(_live_class(base, names))
    return module
