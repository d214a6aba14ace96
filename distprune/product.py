"""Products of a mask and values: what forward sees of a pruned parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distprune.memory import empty_like

# 1 MiB of float32: what is made of a part of a mask stays in a core's cache.
_CHUNK = 1 << 18
# Of fewer elements torch's product takes less time than the calls around it would.
_SMALL = 1 << 14


def write_product(values: Tensor, mask: Tensor, out: Tensor) -> None:
    """Write ``values * mask``, rounded to the dtype of ``out``, into ``out``.

    A product, not a select: what is pruned keeps its sign (-0.0), and inf becomes NaN, as in the
    product that one process computes. The bits are those of ``(values * mask).to(out.dtype)``.

    Args:
        values: of any dtype.
        mask: bool, of the same shape, on the same device.
        out: of the same shape; may be ``values``.

    Cost: on the CPU a pass over the memory, 0.3 to 0.6 ns per element, and some chunks of
    temporaries; torch's product with a bool tensor takes three times as long, and makes a float
    copy of the mask. On other devices that product is one kernel, and it is used.
    """
    if values.device.type != "cpu" or values.numel() < _SMALL:
        torch.mul(values, mask, out=out)
        return
    num_rows = max(1, _CHUNK * len(values) // max(1, values.numel()))
    for first in range(0, len(values), num_rows):
        rows = slice(first, first + num_rows)
        # torch converts bytes to floats four times as fast as bools. True that was read from a
        # file may be any byte but 0.
        keep = mask[rows].view(torch.uint8).clamp(max=1).to(values.dtype)
        torch.mul(values[rows], keep, out=out[rows])


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
