"""What ``torch.sparse.to_sparse_semi_structured`` accepts: dtypes, and multiples of the shape.

The numbers are those of torch 2.11 to 2.15 (torch/sparse/semi_structured.py), for each of its two
backends. A weight is compressed along its last dimension, so its inputs have to lie there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# By backend and dtype: the numbers of rows and columns are multiples of these.
MULTIPLES: dict[str, dict[torch.dtype, tuple[int, int]]] = {
    "cutlass": {
        torch.int8: (16, 128),
        torch.float16: (32, 64),
        torch.bfloat16: (32, 64),
        torch.float32: (32, 32),
    },
    "cusparselt": {
        torch.float8_e4m3fn: (32, 32),
        torch.int8: (32, 32),
        torch.float16: (16, 16),
        torch.bfloat16: (16, 16),
    },
}


def backends_for(shape: Sequence[int], dtype: torch.dtype) -> tuple[str, ...]:
    """The backends that take a matrix of this shape and dtype."""
    if len(shape) != 2 or not all(shape):
        return ()
    return tuple(
        backend
        for backend, by_dtype in MULTIPLES.items()
        if dtype in by_dtype
        and not any(size % of for size, of in zip(shape, by_dtype[dtype], strict=True))
    )


def layout_problem(shape: Sequence[int], dtype: torch.dtype, dims: Sequence[int]) -> str:
    """Why no backend takes a weight; "" if one does.

    Args:
        shape: of the whole weight.
        dtype: of the weight.
        dims: along which its inputs lie; () if that is not known.
    """
    if len(shape) != 2:
        return f"has {len(shape)} dimensions, not 2"
    if tuple(dims) == (0,):
        return "is stored [in, out]: convert its transpose"
    if backends_for(shape, dtype):
        return ""
    accepted = [
        f"{rows} x {columns} ({backend})"
        for backend, by_dtype in MULTIPLES.items()
        for of, (rows, columns) in by_dtype.items()
        if of is dtype
    ]
    if not accepted:
        return f"is of {dtype}, which no backend takes"
    return f"is {shape[0]} x {shape[1]}, no multiple of {' or '.join(accepted)}"
