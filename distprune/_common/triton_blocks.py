"""How a block of a tile is read, in Triton's language; shared by all kernels.

Triton's functions have no types: pyproject.toml tells mypy.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def present_in(length, at, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Which elements of a block lie in the tile."""
    if MASKED:
        return at < length
    return tl.full([BLOCK], True, tl.int1)


@triton.jit
def load_block(
    address, at, present, KIND: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    """The elements of a block: of several at a time, if the address is a multiple of 16 bytes."""
    pointer = address.to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if MASKED:
        return tl.load(pointer + at, mask=present, other=0)
    return tl.load(pointer + at)
