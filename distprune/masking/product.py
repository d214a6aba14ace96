"""The product of mask and parameter that a plain module is left with when it is pruned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distprune.memory import empty_like


def masked_product(mask: Tensor, original: Tensor) -> Tensor:
    """``mask.to(original.dtype) * original``, in memory that is cheap to write for the first time.

    The same bits, and the same gradients of any order, forward mode included. Not for code that
    runs inside of a transform (torch.func, torch.compile): there is no rule for them.

    Cost: half of what the plain product costs on a CPU, where that is spent on page faults.
    """
    return _MaskedProduct.apply(mask.to(dtype=original.dtype), original)


class _MaskedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor, original: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)
        return torch.mul(mask, original, out=empty_like(original, original.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (mask,) = ctx.saved_tensors
        return None, gradient * mask

    @staticmethod
    def jvp(ctx: Any, _: Tensor | None, tangent: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return tangent * mask
