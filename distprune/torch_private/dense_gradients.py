"""Which pruned parameters get dense gradients for now, and the product that gives them.

The value is the masked one, bit for bit; only the backward differs. On plain modules and under
tensor parallelism it passes the gradient of ``mask * weight_orig`` on as it is. Under FSDP the mask
is not part of the graph, and the adapters leave the gradient as it is (fsdp1_mask, fsdp2_mask).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from distprune._common.pruned_form import masked_product


class _Depth:
    """How many contexts make the gradient of a parameter dense now; in the module's ``__dict__``.

    There, because ``torch.compile`` compiles a module again whose attributes change. A copy of the
    module is inside none of the contexts.
    """

    def __init__(self) -> None:
        self.count = 0

    def __reduce__(self) -> tuple[type[_Depth], tuple[()]]:
        return _Depth, ()


def is_dense(module: nn.Module, name: str) -> bool:
    """Whether the gradient of the pruned parameter ``module.<name>`` is to be dense now."""
    depth: _Depth | None
    if torch.compiler.is_compiling():
        # Compiled code has a guard for this, and is compiled again when the attribute changes.
        depth = getattr(module, _key(name), None)
    else:
        depth = module.__dict__.get(_key(name))  # ten times as fast where there is none
    return depth is not None and depth.count > 0


def enter(module: nn.Module, name: str) -> None:
    """Make it dense until :func:`leave`; calls may nest."""
    depth: _Depth = module.__dict__.setdefault(_key(name), _Depth())
    depth.count += 1


def leave(module: nn.Module, name: str) -> None:
    """Undo one call of :func:`enter`."""
    depth: _Depth = module.__dict__[_key(name)]
    depth.count -= 1
    if not depth.count:
        del module.__dict__[_key(name)]  # graphs may still refer to it


def product(module: nn.Module, name: str, original: Tensor, mask: Tensor) -> Tensor:
    """``mask * original``, as :func:`masked_product`, with a dense gradient if that is wanted."""
    if not is_dense(module, name):
        return masked_product(original, mask)
    depth = module.__dict__[_key(name)]
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


def _key(name: str) -> str:
    return f"_distprune_{name}_dense_gradient"
