"""Where the blocks of a parameter lie in a rank's part of it, and the cuts of those that it shares.

A block (see ``_common/blocks.py``) has a number, and its elements have places in it::

    a [4, 6] weight, blocks of 3 inputs     columns 0 to 3 of it, on one rank of two
      0 0 0 | 1 1 1                           0 0 0 | 1
      2 2 2 | 3 3 3                           2 2 2 | 3       blocks 0, 2, 4 and 6 are whole here,
      4 4 4 | 5 5 5                           4 4 4 | 5       and 1, 3, 5 and 7 are cut
      6 6 6 | 7 7 7                           6 6 6 | 7

Parts whose memory is a sequence of whole blocks are ranked band by band (:class:`Places.bands`).
Of all others, the number and the place of each element follow from its index. A radix descent finds
the k-th key of each of them, four bits a step: one histogram of 16 bins per block, summed over all
ranks. Where only some of the elements with that key are pruned, a second descent, over their places
in the block, finds the last one of them::

    block 0   |bins of bits 28 to 31|  ...  |bins of bits 0 to 3|  ->  key, and place of the cut
    block 1   |                     |  ...  |                   |
    ...           all blocks of many parameters in one sum over the ranks

[Note: histograms or elements] A block of float32 takes 8 sums of 16 words of 8 bytes, and less than
that again for ties: 1 to 2 KiB, however many elements it has. To send the elements themselves
would take 8 bytes each, so rows of more than 128 to 256 elements cost less by histograms. Bins of 8
bits would need half as many reads of the elements, but 8 KiB per block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune._common.blocks import BlockRule, Blocks, layout_along
from distprune._common.collectives import Communicator
from distprune._common.memory import Array, Scratch
from distprune.selection.candidates import Candidates
from distprune.selection.keys import KeyRange
from distprune.selection.radix import changed

# Larger bands are not ranked in memory.
_MAX_BAND = 1 << 22
# Positions whose block numbers, int64, are in memory at a time.
_CHUNK = 1 << 18

# Arithmetic progressions of block numbers: (first, step, how many).
Progressions = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class BlockedParameter:
    """The blocks of one whole parameter; the same on all ranks.

    Attributes:
        blocks: of the whole parameter.
        num_blocks: of the whole parameter.
        rule: that made them.
        shape: of the whole parameter.
        dims: that an output sums over, as for ``layout_along``; () if unknown, which is slower.
    """

    blocks: Blocks
    num_blocks: int
    rule: BlockRule
    shape: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def prunes_nothing(self) -> bool:
        """Whether no block loses an element."""
        return not self.blocks.num_pruned or not self.num_blocks


@dataclass(frozen=True)
class Places:
    """Where the blocks of a parameter lie in a local part.

    Attributes:
        local: blocks of the elements in ``bands``, which lie there one after the other.
        bands: flat positions of whole bands of whole blocks.
        rest: ranges of all other flat positions.
        cut: numbers of blocks of which some elements are here, and some are not; ascending.
        whole: numbers of blocks in ``rest`` that are whole all the same; ascending.
    """

    local: Blocks
    bands: range
    rest: tuple[range, ...]
    cut: Array
    whole: Array


NOWHERE = Places(
    Blocks(1, 1, 1, 0), range(0), (), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
)


def places_of(part: Candidates, parameter: BlockedParameter) -> Places:
    """Find the blocks of a local part. Local; reads no element.

    Cost: nothing where the part is a sequence of whole blocks; otherwise some passes over the
    indices of the other elements, and 8 bytes for each block of the parameter.
    """
    everything = range(part.num_local)
    nothing: Array = np.zeros(0, dtype=np.int64)
    blocks = parameter.blocks
    if not part.num_local:
        return NOWHERE
    if parameter.prunes_nothing:
        return Places(NOWHERE.local, range(0), (everything,), nothing, nothing)
    local = _blocks_of_box(part, parameter)
    if local is not None and local.band <= _MAX_BAND:
        return Places(local, everything, (), nothing, nothing)
    bands, rest = range(0), [everything]
    if part.index.start is not None and blocks.band <= _MAX_BAND:
        start = part.index.start
        first = min(-start % blocks.band, part.num_local)
        last = first + (part.num_local - first) // blocks.band * blocks.band
        bands = range(first, last)
        rest = [r for r in (range(first), range(last, part.num_local)) if r]
    numbers = np.zeros(parameter.num_blocks, dtype=np.int64) if rest else nothing
    for span in spans_of_ranges(rest):
        own, _ = number_and_place(part, blocks, span)
        first = int(own.min())
        counts = np.bincount(own - first)
        numbers[first : first + len(counts)] += counts
    cut = np.flatnonzero((numbers > 0) & (numbers < blocks.size))
    return Places(blocks, bands, tuple(rest), cut, np.flatnonzero(numbers == blocks.size))


def _blocks_of_box(part: Candidates, parameter: BlockedParameter) -> Blocks | None:
    """The blocks of a part that is a box in the parameter, if none of them is cut; else None."""
    index, shape, dims = part.index, parameter.shape, parameter.dims
    sizes = [len(rows) for rows in index.coordinates]
    if (
        not dims
        or index.offset
        or index.dims != tuple(range(len(shape)))
        or math.prod(sizes) != part.num_local
    ):
        return None
    inputs = dims[0]
    rule, along = parameter.rule, index.coordinates[inputs]
    if rule.kept_of is not None:
        m = rule.kept_of[1]
        if along.start % m or len(along) % m:
            return None
    elif any(sizes[dim] != shape[dim] for dim in dims):
        return None
    layout = layout_along("", sizes, dims)
    return rule.blocks(part.num_local, layout, parameter.blocks.num_pruned)


def spans_of_ranges(ranges: Iterable[range]) -> Iterator[range]:
    """Chunks of ranges of positions."""
    for positions in ranges:
        for start in range(positions.start, positions.stop, _CHUNK):
            yield range(start, min(start + _CHUNK, positions.stop))


def number_and_place(part: Candidates, blocks: Blocks, span: range) -> tuple[Array, Array]:
    """The block of each element of a span, and its place in it; int64."""
    index = part.index(torch.arange(span.start, span.stop)).numpy()
    band, inside = np.divmod(index, blocks.band)
    if blocks.columns == 1:
        return band, inside
    step, inside = np.divmod(inside, blocks.stride)
    column, inside = np.divmod(inside, blocks.kernel)
    return band * blocks.columns + column, step * blocks.kernel + inside


def to_progressions(numbers: Array) -> Progressions:
    """Ascending numbers as few arithmetic progressions, so that regular ones need few words."""
    if len(numbers) < 2:
        return tuple((int(number), 1, 1) for number in numbers)
    steps = np.diff(numbers)
    # Runs of equal steps. A number that ends one progression does not begin another.
    edges = np.flatnonzero(np.diff(steps)) + 1
    found: list[tuple[int, int, int]] = []
    next_free = 0
    for first, last in itertools.pairwise([0, *edges.tolist(), len(steps)]):
        # Steps [first, last) join numbers [first, last].
        start = max(first, next_free)
        count = last - start + 1
        if count > 1:
            found.append((int(numbers[start]), int(steps[first]), count))
            next_free = start + count
    if next_free < len(numbers):
        found += [(int(number), 1, 1) for number in numbers[next_free:]]
    return tuple(found)


def union(progressions: Sequence[Progressions]) -> Array:
    """All numbers of some progressions, ascending, each once."""
    arrays = [
        first + step * np.arange(count, dtype=np.int64)
        for several in progressions
        for first, step, count in several
    ]
    return np.unique(np.concatenate(arrays)) if arrays else np.zeros(0, dtype=np.int64)


_BITS = 4
_BINS = 1 << _BITS
# Blocks whose histograms are summed at a time, unless one parameter has more: 8 MiB.
MAX_SLOTS = 1 << 16


@dataclass(frozen=True)
class BlocksToCut:
    """Blocks of one parameter that are to be cut.

    Attributes:
        part: this rank's part of the parameter.
        position: of the parameter.
        blocks: of the whole parameter.
        numbers: of the blocks, ascending; the same on all ranks.
        ranges: flat positions of this part that have all of their elements, and perhaps others.
    """

    part: Candidates
    position: int
    blocks: Blocks
    numbers: Array
    ranges: tuple[range, ...]


@dataclass(frozen=True)
class BlockCuts:
    """Where each block is cut: smaller keys go, and of equal ones those up to a place.

    Attributes:
        keys: uint64 [slots], shifted: see :func:`shifted_keys`.
        places: int64 [slots].
    """

    keys: Array
    places: Array


def cut_blocks(
    several: Sequence[BlocksToCut], keys: KeyRange, communicator: Communicator
) -> BlockCuts:
    """Find the cuts of all blocks, slot after slot in the order of ``several``. Collective.

    Args:
        several: the same blocks on all ranks.
        keys: the range of all keys.
        communicator: the ranks that have the elements.

    Raises:
        RuntimeError: the scores changed between two reads.

    Cost: one read of the elements for every four bits of a key, and for ties of a place; memory
    and an all-reduce of 128 bytes per block for each. See [Note: histograms or elements].
    """
    num_slots = sum(len(one.numbers) for one in several)
    num_pruned = np.concatenate(
        [np.full(len(one.numbers), one.blocks.num_pruned, dtype=np.int64) for one in several]
    )
    num_bits = (keys.high - keys.low + 1).bit_length()

    def chunks_of_keys() -> Iterator[tuple[Array, Array]]:
        for slots, shifted, _ in counted_chunks(several, keys):
            yield slots, shifted

    found, ranks, num_ties = _descend(
        chunks_of_keys, num_slots, num_pruned - 1, num_bits, communicator
    )
    largest = max((one.blocks.size for one in several), default=1)
    places = np.full(num_slots, np.iinfo(np.int64).max, dtype=np.int64)
    ties = np.flatnonzero(ranks + 1 < num_ties)
    if not len(ties):
        return BlockCuts(found, places)
    slot_of = np.full(num_slots, -1, dtype=np.int64)
    slot_of[ties] = np.arange(len(ties))

    def chunks_of_places() -> Iterator[tuple[Array, Array]]:
        for slots, shifted, at in counted_chunks(several, keys):
            tied = (shifted == found[slots]) & (slot_of[slots] >= 0)
            yield slot_of[slots[tied]], at[tied].view(np.uint64)

    last, _, _ = _descend(
        chunks_of_places, len(ties), ranks[ties], (largest - 1).bit_length(), communicator
    )
    places[ties] = last.view(np.int64)
    return BlockCuts(found, places)


def counted_chunks(
    several: Sequence[BlocksToCut], keys: KeyRange
) -> Iterator[tuple[Array, Array, Array]]:
    """Slot, shifted key and place of the elements that this rank counts, chunk by chunk."""
    scratch = Scratch()
    offset = 0
    for one in several:
        counted = one.part.counted
        ranges = [range(max(r.start, counted.start), min(r.stop, counted.stop)) for r in one.ranges]
        for span in spans_of_ranges(ranges):
            slots, places, inside = slots_of(one, span)
            shifted = shifted_keys(one.part, span, keys, scratch)
            if inside is not None:
                shifted = shifted[inside]
            yield slots + offset, shifted, places
        offset += len(one.numbers)


def slots_of(one: BlocksToCut, span: range) -> tuple[Array, Array, Array | None]:
    """Slots and places of those elements of a span that are in the blocks, and bool: which are.

    The last one is None if all are.
    """
    numbers, places = number_and_place(one.part, one.blocks, span)
    if len(one.numbers) and len(one.numbers) == one.numbers[-1] + 1:
        slots, inside = numbers, numbers < len(one.numbers)
    else:
        slots = np.searchsorted(one.numbers, numbers)
        np.minimum(slots, max(len(one.numbers) - 1, 0), out=slots)
        inside = one.numbers[slots] == numbers
    if inside.all():
        return slots, places, None
    return slots[inside], places[inside], inside


def shifted_keys(part: Candidates, span: range, keys: KeyRange, scratch: Scratch) -> Array:
    """Keys as uint64, from 1 on; 0 for elements that are pruned already, which come first."""
    loaded = part.keys.load(span.start, span.stop, scratch).values.cpu().numpy()
    shifted: Array = loaded.astype(np.int64).view(np.uint64) - np.uint64((keys.low - 1) % (1 << 64))
    if part.live is not None:
        shifted[part.live[span.start : span.stop].cpu().float().numpy() != 1] = 0
    return shifted


def _descend(
    chunks: Callable[[], Iterator[tuple[Array, Array]]],
    num_slots: int,
    ranks: Array,
    num_bits: int,
    communicator: Communicator,
) -> tuple[Array, Array, Array]:
    """The number of a given rank among those of each slot.

    Args:
        chunks: reads slots, and numbers as uint64.
        num_slots: how many there are; the same on all ranks.
        ranks: int64 [num_slots], from 0.
        num_bits: of the numbers.
        communicator: the ranks.

    Returns:
        Per slot, the number; its rank among equal numbers; and how many equal ones there are.
    """
    found = np.zeros(num_slots, dtype=np.uint64)
    ranks = ranks.copy()
    sizes = np.zeros(num_slots, dtype=np.int64)
    shift = max(num_bits - 1, 0) // _BITS * _BITS

    def count() -> torch.Tensor:
        totals = np.zeros(num_slots * _BINS, dtype=np.int64)
        for slots, numbers in chunks():
            bins = numbers >> np.uint64(shift)
            same = (bins >> np.uint64(_BITS)) == found[slots]
            bins, slots = (bins & np.uint64(_BINS - 1)).view(np.int64)[same], slots[same]
            if len(slots):
                bins += slots * _BINS
                first = int(bins.min())
                counts = np.bincount(bins - first)
                totals[first : first + len(counts)] += counts
        return torch.from_numpy(totals)

    while shift >= 0:
        bins = communicator.reduce(num_slots * _BINS, count).numpy().reshape(num_slots, _BINS)
        sums = np.cumsum(bins, axis=1)
        if num_slots and not (sums[:, -1] > ranks).all():
            raise changed()
        chosen = (sums <= ranks[:, None]).sum(axis=1)
        rows = np.arange(num_slots)
        sizes = bins[rows, chosen]
        ranks -= sums[rows, chosen] - sizes
        found = (found << np.uint64(_BITS)) | chosen.astype(np.uint64)
        shift -= _BITS
    return found, ranks, sizes
