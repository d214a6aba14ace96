"""Kernels that read many masks in one launch, in Triton's language; triton_masks.py launches them.

A program visits one tile, a run of one mask's elements, block by block. A row of a table of int64
says where the tile is; what changes from call to call is in tables, and nothing recompiles. Sums
stay in registers, one per element of a block, until the tile ends. Only a block at the end of a
tile is masked, because masks keep Triton from loading several elements at a time.

Triton's functions have no types: pyproject.toml tells mypy.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from distprune._common.triton_blocks import load_block, present_in


@dataclass(frozen=True)
class Numbers:
    """How elements of a dtype are read.

    Attributes:
        bits: the integers that they are read as.
        is_float: whether the highest bit is a sign, so that there are two zeros.
        is_bool: whether every byte other than 0 is true.
        one: the bits of 1.
        exponent: the bits of the exponent, all of them 1 if a number is infinite or NaN.
    """

    bits: tl.dtype
    is_float: bool
    is_bool: bool
    one: int
    exponent: int


# Columns of a tile, in the table of weigh_tiles.
MASK = tl.constexpr(0)  # address of the first element
LENGTH = tl.constexpr(1)
FIRST = tl.constexpr(2)  # index of the first element in the table of weights
FACTOR = tl.constexpr(3)
# In the table of count_tiles, after the first two: more addresses.
VALUES = tl.constexpr(2)
PRODUCT = tl.constexpr(3)
WIDTH = tl.constexpr(4)
# What count_tiles counts.
NUM_COUNTS = tl.constexpr(4)

# [Note: four bytes at a time] Of four bytes in a word, those that are not 0 get their highest bit;
# a multiplication moves the bits of the others side by side:
#
#     bytes             b3       b2       b1       b0
#     pruned         0000000p 0000000q 0000000r 0000000s
#     * 0x01020408   0000pqrs ........ ........ ........      no carries: all bits lie apart
_LOW = tl.constexpr(0x7F7F7F7F)
_HIGH = tl.constexpr(0x80808080)
_GATHER = tl.constexpr(0x01020408)


@triton.jit
def _is_zero(bits, FORM: tl.constexpr):
    if FORM.is_float:
        return (bits << 1) == 0
    return bits == 0


@triton.jit
def _weigh_block(
    block, mask, length, first, weights,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = block * BLOCK + tl.arange(0, BLOCK)
    present = present_in(length, at, BLOCK, MASKED)
    pruned = _is_zero(load_block(mask, at, present, FORM.bits, ALIGNED, MASKED), FORM) & present
    index = first + at
    weight = tl.load(weights + (index >> 5), mask=present, other=0)
    return tl.where(pruned, weight << (index & 31).to(tl.int64), 0)


@triton.jit
def _weigh_bytes(block, mask, first, weights, BLOCK: tl.constexpr):
    """As :func:`_weigh_block`; see [Note: four bytes at a time]."""
    at = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    pointer = tl.multiple_of(mask.to(tl.pointer_type(tl.uint32)), 16)
    word = tl.load(pointer + at)
    kept = (((word & _LOW) + _LOW) | word) & _HIGH
    pruned = (((kept ^ _HIGH) >> 7) * _GATHER) >> 24
    index = first + at * 4
    weight = tl.load(weights + (index >> 5))
    return (pruned << (index & 31).to(tl.uint32)).to(tl.int64) * weight


@triton.jit
def weigh_tiles(
    table, weights, sums,
    FORM: tl.constexpr, ALIGNED: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the weights of elements that are 0, modulo 2**64, and multiply by the tile's factor.

    Element i of the table of weights has weights[i >> 5] << (i & 31).

    Args:
        table: int64 [tiles, WIDTH].
        weights: int64, for 32 elements each.
        sums: int64 [tiles].
        FORM: Numbers of the mask.
        ALIGNED: whether addresses are multiples of 16 bytes.
        PACKED: whether also indices of first elements are multiples of 4, and elements are bytes.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = table + tile * WIDTH
    mask, length = tl.load(row + MASK), tl.load(row + LENGTH).to(tl.int32)
    first, factor = tl.load(row + FIRST).to(tl.int32), tl.load(row + FACTOR)
    whole = length // BLOCK
    if PACKED:
        by_lane = tl.zeros([BLOCK // 4], tl.int64)
        for block in range(0, whole):
            by_lane += _weigh_bytes(block, mask, first, weights, BLOCK)
    else:
        by_lane = tl.zeros([BLOCK], tl.int64)
        for block in range(0, whole):
            by_lane += _weigh_block(
                block, mask, length, first, weights, FORM, ALIGNED, BLOCK, False
            )
    total = tl.sum(by_lane, 0)
    if whole * BLOCK < length:
        total += tl.sum(
            _weigh_block(whole, mask, length, first, weights, FORM, ALIGNED, BLOCK, True), 0
        )
    tl.store(sums + tile, total * factor)


@triton.jit
def _count_block(
    block, mask, values, product, length,
    FORM: tl.constexpr, VALUE: tl.constexpr, PRODUCT_FORM: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A byte per count, of each element: see count_tiles."""
    at = block * BLOCK + tl.arange(0, BLOCK)
    present = present_in(length, at, BLOCK, MASKED)
    bits = load_block(mask, at, present, FORM.bits, ALIGNED, MASKED)
    zero = _is_zero(bits, FORM) & present
    if FORM.is_bool:
        one = (bits != 0) & present
    else:
        one = (bits == FORM.one) & present
    found = zero.to(tl.uint32) + (one.to(tl.uint32) << 8)
    if VALUE is not None:
        value = load_block(values, at, present, VALUE.bits, ALIGNED, MASKED)
        infinite = zero & ((value & VALUE.exponent) == VALUE.exponent)
        found += infinite.to(tl.uint32) << 16
    if PRODUCT_FORM is not None:
        masked = load_block(product, at, present, PRODUCT_FORM.bits, ALIGNED, MASKED)
        exposed = zero & (_is_zero(masked, PRODUCT_FORM) == 0)
        found += exposed.to(tl.uint32) << 24
    return found


@triton.jit
def count_tiles(
    table, counts, FORM: tl.constexpr, VALUE: tl.constexpr, PRODUCT_FORM: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count what is 0 and 1 in a mask, and what is wrong where it is 0.

    Args:
        table: int64 [tiles, WIDTH]; of fewer than 256 blocks each, so that a count of what is at
            one place in all blocks fits into a byte.
        counts: int32 [tiles, NUM_COUNTS]: zeros; ones; infinite or NaN values under zeros; nonzero
            products under zeros.
        FORM: Numbers of the mask.
        VALUE, PRODUCT_FORM: Numbers of values and products; None: there are none to look at.
        ALIGNED: whether all addresses are multiples of 16 bytes.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = table + tile * WIDTH
    mask, length = tl.load(row + MASK), tl.load(row + LENGTH).to(tl.int32)
    values, product = tl.load(row + VALUES), tl.load(row + PRODUCT)
    whole = length // BLOCK
    found = tl.zeros([BLOCK], tl.uint32)
    for block in range(0, whole):
        found += _count_block(
            block, mask, values, product, length, FORM, VALUE, PRODUCT_FORM, ALIGNED, BLOCK, False
        )
    if whole * BLOCK < length:
        found += _count_block(
            whole, mask, values, product, length, FORM, VALUE, PRODUCT_FORM, ALIGNED, BLOCK, True
        )
    for which in tl.static_range(NUM_COUNTS):
        number = tl.sum(((found >> (8 * which)) & 255).to(tl.int32), 0)
        tl.store(counts + tile * NUM_COUNTS + which, number)
