"""How ``module.weight`` of a plain module is computed: the masked product, in a hook or when read.

``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``, so no hook on
``out_proj`` ever runs. There the module gets a subclass of its class with a property, made once per
class and set of names, as ``torch.nn.utils.parametrize`` does. Every other module keeps its class.

A dense gradient leaves the value as it is, bit for bit; only the backward differs: it passes the
gradient of ``mask * weight_orig`` on as it is. On sharded parameters ``held`` leaves the gradient
as it is.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from distprune.base.pruned_form import mask_key, masked_product, orig_key

_NAMES = "_distprune_live_names"
_BASE = "_distprune_base"


def live_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that are computed at each access."""
    names: tuple[str, ...] = getattr(type(module), _NAMES, ())
    return names


def is_live(module: nn.Module, name: str) -> bool:
    """Whether ``module.<name>`` is computed at each access."""
    return name in live_names(module)


def must_be_live(module: nn.Module) -> bool:
    """Whether ``module.<name>`` has to be computed when it is read: no hook runs before."""
    return isinstance(module, NonDynamicallyQuantizableLinear)


def make_live(module: nn.Module, name: str) -> None:
    """Compute ``module.<name>`` from now on."""
    names = {*live_names(module), name}
    module.__dict__.pop(name, None)  # a value that an earlier hook had set
    module.__class__ = _live_class(base_class(module), tuple(sorted(names)))


def end_live(module: nn.Module, name: str) -> None:
    """Undo :func:`make_live`; the class is the original one after the last name."""
    names = {*live_names(module)} - {name}
    base = base_class(module)
    module.__class__ = _live_class(base, tuple(sorted(names))) if names else base


def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """``module.<name> = value``, of a name that nothing is registered under.

    torch's own ``__setattr__`` looks through all registries first, which takes as long as the
    product of a small weight.
    """
    cls = type(module)
    if (
        cls.__setattr__ is nn.Module.__setattr__
        and name not in module._parameters
        and not hasattr(cls, name)
    ):
        module.__dict__[name] = value
    else:
        setattr(module, name, value)


def release_graph(module: nn.Module, name: str) -> None:
    """Take the graph away from the value that a module keeps, before the next one is computed.

    The node of ``weight_orig`` that accumulates its gradient lives as long as a graph that has it,
    and belongs to the stream on which it was made. A dense model makes a new one in each forward.
    If the last product kept its graph until there is the next, one node would serve all forwards,
    and a backward could not be captured in a CUDA graph, which runs on a stream of its own. A CPU
    has no streams, and saves the time.

    The value stays: the product may fail, and other threads may read it.
    """
    kept = module.__dict__.get(name)
    if not isinstance(kept, Tensor) or kept.is_cpu:
        return
    if kept.requires_grad and torch.is_grad_enabled():
        # Not detach(), which fails on what is left of a forward inside torch.func.vmap.
        assign(module, name, kept.data)


def base_class(module: nn.Module) -> type:
    """The class of a module before :func:`make_live`."""
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
    for name in names:
        attributes[name] = _live_value(name)
    return type(base.__name__, (base,), attributes)


def _live_value(name: str) -> property:
    def get(module: nn.Module) -> Tensor:
        original, mask = module._parameters[orig_key(name)], module._buffers[mask_key(name)]
        assert original is not None and mask is not None
        return product(module, name, original, mask)

    return property(get, _refuse)


def own_property(cls: type, name: str) -> property | None:
    """The property by which a class computes ``module.<name>`` of what it registers, if it does.

    torchtitan's SimpleFSDP gathers parameters in such properties.
    """
    value = inspect.getattr_static(cls, name, None)
    return value if isinstance(value, property) else None


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
    return _restore, (base_class(module), live_names(module)), state


def _restore(base: type, names: tuple[str, ...]) -> nn.Module:
    module: nn.Module = object.__new__(_live_class(base, names))
    return module


class _Depth:
    """How many contexts make the gradient of a parameter dense now; in the module's ``__dict__``.

    There, because ``torch.compile`` compiles a module again whose attributes change. A copy of the
    module is inside none of the contexts.
    """

    def __init__(self) -> None:
        self.count = 0

    def __reduce__(self) -> tuple[type[_Depth], tuple[()]]:
        return _Depth, ()


def has_dense_gradient(module: nn.Module, name: str) -> bool:
    """Whether the gradient of the pruned parameter ``module.<name>`` is to be dense now."""
    depth: _Depth | None
    if torch.compiler.is_compiling():
        # Compiled code has a guard for this, and is compiled again when the attribute changes.
        depth = getattr(module, _depth_key(name), None)
    else:
        depth = module.__dict__.get(_depth_key(name))  # ten times as fast where there is none
    return depth is not None and depth.count > 0


def enter_dense(module: nn.Module, name: str) -> None:
    """Make it dense until :func:`leave_dense`; calls may nest."""
    depth: _Depth = module.__dict__.setdefault(_depth_key(name), _Depth())
    depth.count += 1


def leave_dense(module: nn.Module, name: str) -> None:
    """Undo one call of :func:`enter_dense`."""
    depth: _Depth = module.__dict__[_depth_key(name)]
    depth.count -= 1
    if not depth.count:
        del module.__dict__[_depth_key(name)]  # graphs may still refer to it


def product(module: nn.Module, name: str, original: Tensor, mask: Tensor) -> Tensor:
    """``mask * original``, as :func:`masked_product`, with a dense gradient if that is wanted."""
    if not has_dense_gradient(module, name):
        return masked_product(original, mask)
    depth = module.__dict__[_depth_key(name)]
    result: Tensor = _StraightThrough.apply(original, mask, depth)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    """The masked product, whose backward leaves the mask out: a straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, mask: Tensor, depth: _Depth) -> Tensor:
        ctx.depth = depth
        ctx.save_for_backward(mask)
        return masked_product(original, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.depth.count:
            return gradient, None, None
        # The context was left between forward and backward.
        (mask,) = ctx.saved_tensors
        return masked_product(gradient, mask), None, None


def _depth_key(name: str) -> str:
    return f"_distprune_{name}_dense_gradient"
