"""A method's mask on what an earlier mask leaves, as torch's container combines them."""

from __future__ import annotations

import numbers
from typing import Any, Protocol

from torch import Tensor


class ComputesMask(Protocol):
    """What is needed of a pruning method; a structured one has ``dim``, too."""

    PRUNING_TYPE: Any

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor: ...


def combined_mask(method: ComputesMask, t: Tensor, mask: Tensor) -> Tensor:
    """A method's mask on what an earlier mask leaves, and zeros elsewhere; dtype of ``t``."""
    new_mask = mask.to(dtype=t.dtype, copy=True)
    kind = method.PRUNING_TYPE
    if kind == "unstructured":
        where: Any = mask == 1
    elif kind == "structured":
        if not hasattr(method, "dim"):
            raise AttributeError(
                "Pruning methods of PRUNING_TYPE 'structured' need a 'dim' attribute; "
                f"{type(method).__name__} has none."
            )
        if not isinstance(method.dim, numbers.Integral):
            raise TypeError(
                f"dim={method.dim!r} is a {type(method.dim).__name__}; expected an int."
            )
        dim = int(method.dim)
        dim += t.dim() if dim < 0 else 0
        if not 0 <= dim < t.dim():
            raise IndexError(
                f"dim={method.dim} is out of range for a tensor of shape {tuple(t.shape)}."
            )
        where = [slice(None)] * t.dim()
        where[dim] = mask.sum(dim=[other for other in range(t.dim()) if other != dim]) != 0
        where = tuple(where)
    elif kind == "global":
        where = (slice(None),) * t.dim()
    else:
        raise ValueError(
            f"PRUNING_TYPE {kind!r} is not recognised; expected 'unstructured', 'structured' or "
            "'global'."
        )
    mask_inside = method.compute_mask(t[where], default_mask=mask[where])
    new_mask[where] = mask_inside.to(dtype=new_mask.dtype)
    return new_mask
