"""The kernels in Triton's language; triton_kernels.py launches them.

A program visits one tile, a run of one parameter's elements, block by block. A row of a table of
int64 says where the tile is, so that one launch visits tiles of many parameters. What changes from
call to call is in tables and not among the arguments: Triton would compile again for other values.

Only a block at the end of a tile is masked, because masks keep Triton from loading several elements
at a time.

Triton's functions have no types: pyproject.toml tells mypy.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Format:
    """What a launch is compiled for.

    Attributes:
        scores: the integers that scores are read as.
        is_widened: whether bfloat16 scores are ranked as float32.
        magnitudes: the bits of a key below the sign.
        largest: the largest key of a number.
        order: 0 by magnitude, 1 ascending, -1 descending.
        is_random: whether keys are hashes of indices, and no scores are read.
        keys: the integers that keys are stored as.
        has_live: whether there is a mask in force.
        masks: the integers that masks are read and written as.
        is_bool: whether every mask byte other than 0 is true.
        one: the bits of 1 in a mask.
        is_aligned: whether all addresses are multiples of 16 bytes.
    """

    scores: tl.dtype
    is_widened: bool
    magnitudes: int
    largest: int
    order: int
    is_random: bool
    keys: tl.dtype
    has_live: bool
    masks: tl.dtype
    is_bool: bool
    one: int
    is_aligned: bool


# Columns of a tile, in the tables of scan_tiles and write_tiles.
SCORES = tl.constexpr(0)  # address, or the global index of the first element if keys are random
LIVE = tl.constexpr(1)  # address of the mask in force
OUT = tl.constexpr(2)  # address of the new mask
LENGTH = tl.constexpr(3)
# to scan
FIRST = tl.constexpr(4)  # position, in its chunk, of the tile's first element
PLACE = tl.constexpr(5)  # where, in the outputs, its collected elements go
CAPACITY = tl.constexpr(6)  # how many of them may
# to write
THRESHOLD = tl.constexpr(4)
END = tl.constexpr(5)  # ties are pruned in front of this position in the tile
WIDTH = tl.constexpr(7)

# SplitMix64, as in _common/hashing.py.
_WEYL = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MIX_2 = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _hashes(indices, seed, FORM: tl.constexpr):
    x = (indices * _WEYL + seed).to(tl.uint64, bitcast=True)
    x = x ^ (x >> 30)
    x = (x.to(tl.int64, bitcast=True) * _MIX_1).to(tl.uint64, bitcast=True)
    x = x ^ (x >> 27)
    x = (x.to(tl.int64, bitcast=True) * _MIX_2).to(tl.uint64, bitcast=True)
    x = x ^ (x >> 31)
    return tl.minimum((x >> 1).to(tl.int64, bitcast=True), FORM.largest)


@triton.jit
def _present(length, at, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Which elements of a block lie in the tile."""
    if MASKED:
        return at < length
    return tl.full([BLOCK], True, tl.int1)


@triton.jit
def _load(address, at, present, KIND: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr):
    pointer = address.to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if MASKED:
        return tl.load(pointer + at, mask=present, other=0)
    return tl.load(pointer + at)


@triton.jit
def _keys(scores, at, present, seed, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Keys of a block, as keys.[Note: keys]: int64 if they take 64 bits, otherwise int32."""
    if FORM.is_random:
        return _hashes(scores + at.to(tl.int64), seed, FORM)
    bits = _load(scores, at, present, FORM.scores, FORM.is_aligned, MASKED)
    if FORM.scores.primitive_bitwidth == 16:
        bits = bits.to(tl.int32)
    if FORM.is_widened:
        bits = bits << 16
    keys = tl.minimum(bits & FORM.magnitudes, FORM.largest + 1)
    if FORM.order > 0:
        keys = tl.where((bits < 0) & (keys <= FORM.largest), -keys, keys)
    if FORM.order < 0:
        keys = tl.where((bits > 0) & (keys <= FORM.largest), -keys, keys)
    return keys


@triton.jit
def _live(live_mask, at, present, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Which elements of a block compete, and the bits of their mask if there is one.

    Beyond the end of a tile the bits are 0.
    """
    live = present
    bits = at
    if FORM.has_live:
        bits = _load(live_mask, at, present, FORM.masks, FORM.is_aligned, MASKED)
        if FORM.is_bool:
            live = bits != 0
        else:
            live = bits == FORM.one
    return live, bits


@triton.jit
def _store(out, at, present, pruned, bits, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Write a block of a mask: 0 where pruned; elsewhere the bits before, or 1."""
    pointer = out.to(tl.pointer_type(FORM.masks))
    if FORM.is_aligned:
        pointer = tl.multiple_of(pointer, 16)
    if FORM.has_live:
        if FORM.is_bool:
            values = ((pruned == 0) & (bits != 0)).to(FORM.masks)
        else:
            values = tl.where(pruned, 0, bits).to(FORM.masks)
    else:
        values = tl.where(pruned, 0, FORM.one).to(FORM.masks)
    if MASKED:
        tl.store(pointer + at, values, mask=present)
    else:
        tl.store(pointer + at, values)


@triton.jit
def _scan_block(
    block, taken, totals, scores, live_mask, out, length, first, place, capacity, seed, low, high,
    numbers, keys_out, positions_out,
    FORM: tl.constexpr, NUM_PIVOTS: tl.constexpr, SLOTS: tl.constexpr, COLLECTS: tl.constexpr,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = block * BLOCK + tl.arange(0, BLOCK)
    present = _present(length, at, BLOCK, MASKED)
    keys = _keys(scores, at, present, seed, FORM, MASKED)
    live, bits = _live(live_mask, at, present, FORM, MASKED)
    slots = tl.arange(0, SLOTS)
    if COLLECTS:
        below = live & (keys < low.to(keys.dtype))
        inside = live & (keys >= low.to(keys.dtype)) & (keys <= high.to(keys.dtype))
        num_inside = tl.sum(inside.to(tl.int32), 0)
        totals += tl.where(slots == 0, num_inside, 0)
        totals += tl.where(slots == 1, tl.sum(below.to(tl.int32), 0), 0)
        if DRAFTS:
            _store(out, at, present, below, bits, FORM, MASKED)
        if num_inside > 0:
            number = taken + tl.cumsum(inside.to(tl.int32), 0) - 1
            kept = inside & (number < capacity)
            tl.store(keys_out + place + number, keys.to(FORM.keys), mask=kept)
            tl.store(positions_out + place + number, (first + at).to(tl.int32), mask=kept)
        taken += num_inside
    for pivot in tl.static_range(NUM_PIVOTS):
        upto = live & (keys <= tl.load(numbers + 3 + pivot).to(keys.dtype))
        totals += tl.where(slots == 2 + pivot, tl.sum(upto.to(tl.int32), 0), 0)
    return taken, totals


@triton.jit
def scan_tiles(
    table, numbers, counts, keys_out, positions_out,
    FORM: tl.constexpr, NUM_PIVOTS: tl.constexpr, SLOTS: tl.constexpr, COLLECTS: tl.constexpr,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count keys, collect those of an interval in the order of their positions, draft the masks.

    Args:
        table: int64 [tiles, WIDTH].
        numbers: int64: the seed, both ends of the interval, the pivots.
        counts: int32 [tiles, SLOTS]: live elements inside the interval, below it, and up to each
            pivot.
        keys_out, positions_out: 1-d, of dtype FORM.keys and int32.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = table + tile * WIDTH
    # Loaded once: no block has to wait for them.
    scores, live_mask, out = tl.load(row + SCORES), tl.load(row + LIVE), tl.load(row + OUT)
    length = tl.load(row + LENGTH).to(tl.int32)
    first, place, capacity = tl.load(row + FIRST), tl.load(row + PLACE), tl.load(row + CAPACITY)
    seed, low, high = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    whole = length // BLOCK
    taken = tl.full([], 0, tl.int32)
    totals = tl.zeros([SLOTS], tl.int32)
    for block in range(0, whole):
        taken, totals = _scan_block(
            block, taken, totals, scores, live_mask, out, length, first, place, capacity, seed,
            low, high, numbers, keys_out, positions_out,
            FORM, NUM_PIVOTS, SLOTS, COLLECTS, DRAFTS, BLOCK, False,
        )  # fmt: skip
    if whole * BLOCK < length:
        taken, totals = _scan_block(
            whole, taken, totals, scores, live_mask, out, length, first, place, capacity, seed,
            low, high, numbers, keys_out, positions_out,
            FORM, NUM_PIVOTS, SLOTS, COLLECTS, DRAFTS, BLOCK, True,
        )  # fmt: skip
    tl.store(counts + tile * SLOTS + tl.arange(0, SLOTS), totals)


@triton.jit
def _write_block(
    block, scores, live_mask, out, length, threshold, end, seed,
    FORM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = block * BLOCK + tl.arange(0, BLOCK)
    present = _present(length, at, BLOCK, MASKED)
    keys = _keys(scores, at, present, seed, FORM, MASKED)
    live, bits = _live(live_mask, at, present, FORM, MASKED)
    is_tie = (keys == threshold.to(keys.dtype)) & (at < end)
    pruned = live & ((keys < threshold.to(keys.dtype)) | is_tie)
    _store(out, at, present, pruned, bits, FORM, MASKED)
    return tl.sum(pruned.to(tl.int32), 0)


@triton.jit
def write_tiles(table, numbers, counts, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Write masks: what lies before a cut is pruned.

    Args:
        table: int64 [tiles, WIDTH].
        numbers: int64: the seed.
        counts: int32 [tiles]: live elements that were pruned.
    """
    tile = tl.program_id(0).to(tl.int64)
    row = table + tile * WIDTH
    scores, live_mask, out = tl.load(row + SCORES), tl.load(row + LIVE), tl.load(row + OUT)
    length = tl.load(row + LENGTH).to(tl.int32)
    threshold, end, seed = tl.load(row + THRESHOLD), tl.load(row + END), tl.load(numbers)
    whole = length // BLOCK
    num_pruned = tl.full([], 0, tl.int32)
    for block in range(0, whole):
        num_pruned += _write_block(
            block, scores, live_mask, out, length, threshold, end, seed, FORM, BLOCK, False
        )
    if whole * BLOCK < length:
        num_pruned += _write_block(
            whole, scores, live_mask, out, length, threshold, end, seed, FORM, BLOCK, True
        )
    tl.store(counts + tile, num_pruned)


@triton.jit
def pack_tiles(table, keys_in, positions_in, keys_out, positions_out, BLOCK: tl.constexpr):
    """Move what the tiles collected to where it lies without gaps.

    Args:
        table: int64 [tiles, 3]: from where, to where, how many.
        keys_in, positions_in: what :func:`scan_tiles` wrote.
        keys_out, positions_out: of the same dtypes.
    """
    row = table + tl.program_id(0).to(tl.int64) * 3
    source = tl.load(row)
    target = tl.load(row + 1)
    number = tl.load(row + 2).to(tl.int32)
    for block in range(0, tl.cdiv(number, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        present = at < number
        keys = tl.load(keys_in + source + at, mask=present, other=0)
        tl.store(keys_out + target + at, keys, mask=present)
        positions = tl.load(positions_in + source + at, mask=present, other=0)
        tl.store(positions_out + target + at, positions, mask=present)


@triton.jit
def correct_runs(table, counts, KEYS: tl.constexpr, MASKS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero those collected elements that lie before a cut; their masks are 1.

    Args:
        table: int64 [runs, 6]: addresses of keys, of positions and of the chunk's mask; how many
            elements; the threshold; the position in the chunk in front of which ties are pruned.
        counts: int32 [runs]: how many were zeroed.
    """
    run = tl.program_id(0).to(tl.int64)
    row = table + run * 6
    keys_in = tl.load(row).to(tl.pointer_type(KEYS))
    positions_in = tl.load(row + 1).to(tl.pointer_type(tl.int32))
    mask = tl.load(row + 2).to(tl.pointer_type(MASKS))
    number = tl.load(row + 3).to(tl.int32)
    threshold = tl.load(row + 4)
    end = tl.load(row + 5)
    num_pruned = tl.full([], 0, tl.int32)
    for block in range(0, tl.cdiv(number, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        present = at < number
        keys = tl.load(keys_in + at, mask=present, other=0).to(tl.int64)
        positions = tl.load(positions_in + at, mask=present, other=0)
        pruned = present & ((keys < threshold) | ((keys == threshold) & (positions < end)))
        tl.store(mask + positions, tl.zeros([BLOCK], MASKS), mask=pruned)
        num_pruned += tl.sum(pruned.to(tl.int32), 0)
    tl.store(counts + run, num_pruned)
