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
# Counts that a scan has registers for.
MOST_PIVOTS = 9

# SplitMix64, as in base/hashing.py.
_WEYL = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MIX_2 = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _present_in(length, at, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Which elements of a block lie in the tile."""
    if MASKED:
        return at < length
    return tl.full([BLOCK], True, tl.int1)


@triton.jit
def _load_block(
    address, at, present, KIND: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    """The elements of a block: of several at a time, if the address is a multiple of 16 bytes."""
    pointer = address.to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if MASKED:
        return tl.load(pointer + at, mask=present, other=0)
    return tl.load(pointer + at)


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
def _keys(scores, at, present, seed, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Keys of a block, as keys.[Note: keys]: int64 if they take 64 bits, otherwise int32."""
    if FORM.is_random:
        return _hashes(scores + at.to(tl.int64), seed, FORM)
    bits = _load_block(scores, at, present, FORM.scores, FORM.is_aligned, MASKED)
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
        bits = _load_block(live_mask, at, present, FORM.masks, FORM.is_aligned, MASKED)
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


# Two counts of an element's place in all blocks of a tile are kept in one register.
_HALF = tl.constexpr(16)
_FIRST_HALF = tl.constexpr((1 << 16) - 1)


@triton.jit
def _scan_block(
    block, taken, below_and_first, second, third, fourth, fifth, scores, live_mask, out, length,
    first, place, capacity, seed, low, high, numbers, keys_out, positions_out,
    FORM: tl.constexpr, NUM_PIVOTS: tl.constexpr, COLLECTS: tl.constexpr, DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = block * BLOCK + tl.arange(0, BLOCK)
    present = _present_in(length, at, BLOCK, MASKED)
    keys = _keys(scores, at, present, seed, FORM, MASKED)
    live, bits = _live(live_mask, at, present, FORM, MASKED)
    if COLLECTS:
        below = live & (keys < low.to(keys.dtype))
        inside = live & (keys >= low.to(keys.dtype)) & (keys <= high.to(keys.dtype))
        below_and_first += below.to(tl.int32)
        if DRAFTS:
            _store(out, at, present, below, bits, FORM, MASKED)
        num_inside = tl.sum(inside.to(tl.int32), 0)
        if num_inside > 0:
            number = taken + tl.cumsum(inside.to(tl.int32), 0) - 1
            kept = inside & (number < capacity)
            tl.store(keys_out + place + number, keys.to(FORM.keys), mask=kept)
            tl.store(positions_out + place + number, (first + at).to(tl.int32), mask=kept)
        taken += num_inside
    for pivot in tl.static_range(NUM_PIVOTS):
        upto = (live & (keys <= tl.load(numbers + 3 + pivot).to(keys.dtype))).to(tl.int32)
        if pivot == 0:
            below_and_first += upto << _HALF
        elif pivot < 3:
            second += upto << (_HALF * ((pivot + 1) % 2))
        elif pivot < 5:
            third += upto << (_HALF * ((pivot + 1) % 2))
        elif pivot < 7:
            fourth += upto << (_HALF * ((pivot + 1) % 2))
        else:
            fifth += upto << (_HALF * ((pivot + 1) % 2))
    return taken, below_and_first, second, third, fourth, fifth


@triton.jit
def _store_counts(target, both, FIRST_IS_WANTED: tl.constexpr, SECOND_IS_WANTED: tl.constexpr):
    if FIRST_IS_WANTED:
        tl.store(target, tl.sum(both & _FIRST_HALF, 0))
    if SECOND_IS_WANTED:
        tl.store(target + 1, tl.sum(both >> _HALF, 0))


@triton.jit
def scan_tiles(
    table, numbers, counts, keys_out, positions_out,
    FORM: tl.constexpr, NUM_PIVOTS: tl.constexpr, SLOTS: tl.constexpr, COLLECTS: tl.constexpr,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count keys, collect those of an interval in the order of their positions, draft the masks.

    Args:
        table: int64 [tiles, WIDTH].
        numbers: int64: the seed, both ends of the interval, the pivots; MOST_PIVOTS at most.
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
    target = counts + tile * SLOTS
    taken = tl.full([], 0, tl.int32)
    below_and_first = tl.zeros([BLOCK], tl.int32)
    second = tl.zeros([BLOCK], tl.int32)
    third = tl.zeros([BLOCK], tl.int32)
    fourth = tl.zeros([BLOCK], tl.int32)
    fifth = tl.zeros([BLOCK], tl.int32)
    for block in range(0, whole):
        taken, below_and_first, second, third, fourth, fifth = _scan_block(
            block, taken, below_and_first, second, third, fourth, fifth, scores, live_mask, out,
            length, first, place, capacity, seed, low, high, numbers, keys_out, positions_out,
            FORM, NUM_PIVOTS, COLLECTS, DRAFTS, BLOCK, False,
        )  # fmt: skip
    if whole * BLOCK < length:
        taken, below_and_first, second, third, fourth, fifth = _scan_block(
            whole, taken, below_and_first, second, third, fourth, fifth, scores, live_mask, out,
            length, first, place, capacity, seed, low, high, numbers, keys_out, positions_out,
            FORM, NUM_PIVOTS, COLLECTS, DRAFTS, BLOCK, True,
        )  # fmt: skip
    tl.store(target, taken)
    _store_counts(target + 1, below_and_first, True, NUM_PIVOTS > 0)
    _store_counts(target + 3, second, NUM_PIVOTS > 1, NUM_PIVOTS > 2)
    _store_counts(target + 5, third, NUM_PIVOTS > 3, NUM_PIVOTS > 4)
    _store_counts(target + 7, fourth, NUM_PIVOTS > 5, NUM_PIVOTS > 6)
    _store_counts(target + 9, fifth, NUM_PIVOTS > 7, NUM_PIVOTS > 8)


@triton.jit
def _write_block(
    block, scores, live_mask, out, length, threshold, end, seed,
    FORM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = block * BLOCK + tl.arange(0, BLOCK)
    present = _present_in(length, at, BLOCK, MASKED)
    keys = _keys(scores, at, present, seed, FORM, MASKED)
    live, bits = _live(live_mask, at, present, FORM, MASKED)
    is_tie = (keys == threshold.to(keys.dtype)) & (at < end)
    pruned = live & ((keys < threshold.to(keys.dtype)) | is_tie)
    _store(out, at, present, pruned, bits, FORM, MASKED)
    return pruned.to(tl.int32)


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
    num_pruned = tl.zeros([BLOCK], tl.int32)
    for block in range(0, whole):
        num_pruned += _write_block(
            block, scores, live_mask, out, length, threshold, end, seed, FORM, BLOCK, False
        )
    if whole * BLOCK < length:
        num_pruned += _write_block(
            whole, scores, live_mask, out, length, threshold, end, seed, FORM, BLOCK, True
        )
    tl.store(counts + tile, tl.sum(num_pruned, 0))


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
    num_pruned = tl.zeros([BLOCK], tl.int32)
    for block in range(0, tl.cdiv(number, BLOCK)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        present = at < number
        keys = tl.load(keys_in + at, mask=present, other=0).to(tl.int64)
        positions = tl.load(positions_in + at, mask=present, other=0)
        pruned = present & ((keys < threshold) | ((keys == threshold) & (positions < end)))
        tl.store(mask + positions, tl.zeros([BLOCK], MASKS), mask=pruned)
        num_pruned += pruned.to(tl.int32)
    tl.store(counts + run, tl.sum(num_pruned, 0))


# Columns of the table of sample_tiles: addresses as above, ...
_START = tl.constexpr(2)  # ... the position of the first run, ...
_DRAWN_FIRST = tl.constexpr(4)  # ... the tile's first element among those drawn of the part, ...
_NUM_RUNS = tl.constexpr(6)  # ... how many runs there are, and how many are drawn
_NUM_DRAWN = tl.constexpr(7)
_SAMPLE_WIDTH = tl.constexpr(8)


@triton.jit
def sample_tiles(
    table, numbers, keys_out, FORM: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr
):
    """Keys of some runs of elements, one at a jittered place in each stratum of a part.

    Args:
        table: int64 [tiles, _SAMPLE_WIDTH].
        numbers: int64: the seed, the key of elements that do not compete, the seed of the jitter.
        keys_out: 1-d, of dtype FORM.keys.
        RUN: elements of a run.
    """
    row = table + tl.program_id(0).to(tl.int64) * _SAMPLE_WIDTH
    scores, live_mask, start = tl.load(row + SCORES), tl.load(row + LIVE), tl.load(row + _START)
    length = tl.load(row + LENGTH).to(tl.int32)
    first, place = tl.load(row + _DRAWN_FIRST), tl.load(row + PLACE)
    num_runs, num_drawn = tl.load(row + _NUM_RUNS), tl.load(row + _NUM_DRAWN)
    seed, dead, salt = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    local = tl.arange(0, BLOCK)
    present = local < length
    drawn = first + local
    run = drawn // RUN
    mixed = ((run + salt) * _WEYL).to(tl.uint64, bitcast=True) >> 40  # 24 bits
    jitter = (mixed.to(tl.int64, bitcast=True) * num_runs) >> 24
    at = start + (run * num_runs + jitter) // num_drawn * RUN + drawn % RUN
    keys = _keys(scores, at, present, seed, FORM, True)
    live, _ = _live(live_mask, at, present, FORM, True)
    tl.store(keys_out + place + local, tl.where(live, keys, dead).to(FORM.keys), mask=present)


@triton.jit
def count_bins(keys, numbers, counts, BLOCK: tl.constexpr):
    """Count the keys of an interval in bins; each program in a row of its own.

    Args:
        keys: 1-d.
        numbers: int64: how many keys, both ends of the interval, the shift from a key to a bin, the
            first bin, how many bins.
        counts: int32 [programs, bins], zeros.
    """
    number, low, high = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    shift, first, num_bins = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    program = tl.program_id(0).to(tl.int64)
    row = counts + program * num_bins
    num_programs = tl.num_programs(0).to(tl.int64)
    for block in range(0, tl.cdiv(number, num_programs * BLOCK)):
        at = (block * num_programs + program) * BLOCK + tl.arange(0, BLOCK)
        present = at < number
        key = tl.load(keys + at, mask=present, other=0).to(tl.int64)
        inside = present & (key >= low) & (key <= high)
        one = inside.to(tl.int32)
        tl.atomic_add(row + ((key >> shift) - first), one, mask=inside, sem="relaxed")
