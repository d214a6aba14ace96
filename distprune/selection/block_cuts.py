"""Where the blocks of a parameter lie in a rank's part of it.

A block (see ``base/blocks.py``) has a number, and its elements have places in it::

    a [4, 6] weight, blocks of 3 inputs     columns 0 to 3 of it, on one rank of two
      0 0 0 | 1 1 1                           0 0 0 | 1
      2 2 2 | 3 3 3                           2 2 2 | 3       blocks 0, 2, 4 and 6 are whole here,
      4 4 4 | 5 5 5                           4 4 4 | 5       and 1, 3, 5 and 7 are cut
      6 6 6 | 7 7 7                           6 6 6 | 7

Parts whose memory is a sequence of whole blocks are ranked band by band (:class:`Places.bands`).
All others are cut into pieces: neighbours in memory that are neighbours in a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from distprune.base.blocks import BlockRule, Blocks, layout_along
from distprune.base.memory import Array
from distprune.selection.candidates import Candidates

# Larger bands are not ranked in memory.
_MAX_BAND = 1 << 22
# Positions whose pieces are in memory at a time.
_CHUNK = 1 << 18

# Arithmetic progressions of block numbers: (first, step, how many).
Progressions = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class BlockedParameter:
    """The blocks of one whole parameter; the same on all ranks.

    Attributes:
        blocks: of the whole parameter.
        rule: that made them.
        shape: of the whole parameter.
        dims: that an output sums over, as for ``layout_along``; () if unknown, which is slower.
    """

    blocks: Blocks
    rule: BlockRule
    shape: tuple[int, ...]
    dims: tuple[int, ...]


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
    if not blocks.num_pruned:
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
    numbers = np.zeros(part.numel // blocks.size if rest else 0, dtype=np.int64)
    for span in spans_of_ranges(rest):
        pieces = pieces_of(part, blocks, span)
        first = int(pieces.numbers.min())
        counts = np.bincount(pieces.numbers - first, pieces.lengths)
        numbers[first : first + len(counts)] += counts.astype(np.int64)
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


class Pieces(NamedTuple):
    """Neighbours in memory that are neighbours in a block, one piece after the other.

    Attributes:
        numbers: int64 [n], of the blocks.
        places: int64 [n], of the first element in its block.
        lengths: int64 [n], elements.
    """

    numbers: Array
    places: Array
    lengths: Array


def pieces_of(part: Candidates, blocks: Blocks, span: range) -> Pieces:
    """The pieces of a span of positions.

    Cost: some operations per piece. Where a block is a row of memory, that is one per row; where
    blocks lie side by side, an element is a piece.
    """
    index, run = part.index, part.index.run
    next_run = ((span.start + index.offset) // run + 1) * run - index.offset
    rest = np.arange(min(next_run, span.stop), span.stop, run)
    starts = np.concatenate([[span.start], rest, [span.stop]])
    lengths = starts[1:] - starts[:-1]
    indices: Array = index(torch.from_numpy(starts[:-1])).numpy()
    grain = blocks.size if blocks.columns == 1 else blocks.kernel
    grains = indices // grain
    counts = (indices + lengths - 1) // grain - grains + 1
    if len(counts) < (total := int(counts.sum())):
        ends = np.repeat(indices + lengths, counts)
        first = np.repeat(grains - (np.cumsum(counts) - counts), counts) + np.arange(total)
        first *= grain
        np.minimum(ends, first + grain, out=ends)
        indices = np.maximum(np.repeat(indices, counts), first)
        lengths = ends - indices
    bands = indices // blocks.band
    inside = indices - bands * blocks.band
    if blocks.columns == 1:
        return Pieces(bands, inside, lengths)
    steps = inside // blocks.stride
    inside -= steps * blocks.stride
    columns = inside // blocks.kernel
    inside -= columns * blocks.kernel
    return Pieces(bands * blocks.columns + columns, steps * blocks.kernel + inside, lengths)


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
