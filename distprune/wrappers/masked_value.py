"""How ``module.weight`` of a plain module is computed: the masked product, in a hook or when read.

``nn.MultiheadAttention`` reads ``out_proj.weight`` without calling ``out_proj``, so no hook on
``out_proj`` ever runs. There the module gets a subclass of its class with properties, as
``torch.nn.utils.parametrize`` makes one. Every other module keeps its class.

A dense gradient leaves the value as it is, bit for bit; only the backward differs: it passes the
gradient of ``mask * weight_orig`` on as it is. On sharded parameters ``held`` leaves the gradient
as it is.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from distprune.base.pruned_form import MASK, ORIG, lost_mask, masked_product


def _when_read(name: str) -> property:
    def get(module: nn.Module) -> Tensor | None:
        original, mask = module._parameters.get(name + ORIG), module._buffers.get(name + MASK)
        if original is None:
            return module._parameters[name]
        if mask is None:
            raise lost_mask(module, name)
        return product(module, name, original, mask)

    return property(get)


class PrunedOutProjection(NonDynamicallyQuantizableLinear):
    """The ``out_proj`` of an attention, whose pruned parameters are computed at each access."""

    weight = _when_read("weight")  # type: ignore[assignment]
    bias = _when_read("bias")  # type: ignore[assignment]

    def _get_name(self) -> str:
        return NonDynamicallyQuantizableLinear.__name__


def live_names(module: nn.Module) -> list[str]:
    """Names of the parameters that are computed at each access."""
    return [name for name in ("weight", "bias") if is_live(module, name)]


def is_live(module: nn.Module, name: str) -> bool:
    """Whether ``module.<name>`` is computed at each access."""
    return type(module) is PrunedOutProjection and name + ORIG in module._parameters


def must_be_live(module: nn.Module) -> bool:
    """Whether ``module.<name>`` has to be computed when it is read: no hook runs before."""
    is_projection = isinstance(module, NonDynamicallyQuantizableLinear)
    if is_projection and type(module) not in (NonDynamicallyQuantizableLinear, PrunedOutProjection):
        raise NotImplementedError(
            f"{type(module).__name__}, a subclass of torch's out_proj, is read without a call."
        )
    return is_projection


def make_live(module: nn.Module, name: str) -> None:
    """Compute ``module.<name>`` from now on."""
    module.__dict__.pop(name, None)  # a value that an earlier hook had set
    module.__class__ = PrunedOutProjection


def end_live(module: nn.Module, name: str) -> None:
    """Undo :func:`make_live`; the class is the original one after the last name."""
    if live_names(module) == [name]:
        module.__class__ = NonDynamicallyQuantizableLinear


def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """``module.<name> = value``, of a name that nothing is registered under.

    torch's own ``__setattr__`` looks through all registries first, which takes as long as the
    product of a small weight.
    """
    cls = type(module)
    is_usual = cls.__setattr__ is nn.Module.__setattr__ and not hasattr(cls, name)
    if is_usual and name not in module._parameters:
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
    kept: Any = module.__dict__.get(name)
    has_graph = isinstance(kept, Tensor) and not kept.is_cpu and kept.requires_grad
    if has_graph and torch.is_grad_enabled():
        # Not detach(), which fails on what is left of a forward inside torch.func.vmap.
        assign(module, name, kept.data)


def has_own_property(module: nn.Module, name: str) -> bool:
    """Whether the class of a module computes ``module.<name>`` in a property of its own.

    torchtitan's SimpleFSDP gathers parameters in such properties.
    """
    value = inspect.getattr_static(type(module), name, None)
    return isinstance(value, property) and type(module) is not PrunedOutProjection


class NotCopied(dict[Any, Any]):
    """What is in an attribute of a module or a tensor, and empty in its copies.

    An attribute: torch cannot swap tensors, as ``.to()`` does, that have weak references.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[type[NotCopied], tuple[()]]:
        return NotCopied, ()


# By this key, how many contexts make the gradient of a parameter dense now. It is in an attribute
# of the module, because ``torch.compile`` compiles a module again whose attributes change.
_DEPTH = "depth"


def has_dense_gradient(module: nn.Module, name: str) -> bool:
    """Whether the gradient of the pruned parameter ``module.<name>`` is to be dense now."""
    key, is_compiling = _depth_key(name), torch.compiler.is_compiling()
    # Compiled code has a guard for the attribute, and is compiled again when this changes; the
    # dictionary is ten times as fast where there is none.
    depth: Any = getattr(module, key, None) if is_compiling else module.__dict__.get(key)
    return depth is not None and bool(depth.get(_DEPTH))


def enter_dense(module: nn.Module, name: str) -> None:
    """Make it dense until :func:`leave_dense`; calls may nest."""
    depth = module.__dict__.setdefault(_depth_key(name), NotCopied())
    depth[_DEPTH] = depth.get(_DEPTH, 0) + 1


def leave_dense(module: nn.Module, name: str) -> None:
    """Undo one call of :func:`enter_dense`."""
    depth = module.__dict__[_depth_key(name)]
    depth[_DEPTH] -= 1
    if not depth[_DEPTH]:
        del module.__dict__[_depth_key(name)]  # graphs may still refer to it


def product(module: nn.Module, name: str, original: Tensor, mask: Tensor) -> Tensor:
    """``mask * original``, as :func:`masked_product`, with a dense gradient if that is wanted."""
    if not has_dense_gradient(module, name):
        return masked_product(original, mask)
    depth = module.__dict__[_depth_key(name)]
    return _StraightThrough.apply(original, mask, depth)  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """The masked product, whose backward leaves the mask out: a straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, original: Tensor, mask: Tensor, depth: NotCopied) -> Tensor:
        ctx.depth = depth
        ctx.save_for_backward(mask)
        return masked_product(original, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.depth[_DEPTH]:
            return gradient, None, None
        # The context was left between forward and backward.
        (mask,) = ctx.saved_tensors
        return masked_product(gradient, mask), None, None


def _depth_key(name: str) -> str:
    return f"_distprune_{name}_dense_gradient"
