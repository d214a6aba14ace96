"""Which tiles of a tensor are pruned, in runs of whole bands.

Tiles are ranked by their keys alone. Those who write or compare their elements read these again: a
run of many tiles has more elements than fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from distprune._common.element_groups import Groups
from distprune._common.lowest_of_groups import lowest_of
from distprune._common.memory import Scratch
from distprune.files.ranking.columns import ColumnCuts, is_too_large
from distprune.files.ranking.descending import find_threshold
from distprune.files.ranking.keys import Array
from distprune.files.ranking.lowest import Threshold
from distprune.files.ranking.streaming import CHUNK, MAX_IN_MEMORY, Source


class TileRun(NamedTuple):
    """Consecutive tiles of whole bands.

    Attributes:
        first: number of the first one in its tensor.
        keys: of each.
        lowest: bool, which of them are pruned; valid until the next run.
    """

    first: int
    keys: Array
    lowest: Array


def read_tiles(source: Source, position: int, first: int, last: int) -> Iterator[tuple[int, Array]]:
    """The keys of the tiles [first, last), whole bands, about a chunk of elements at a time."""
    step = _step_of(source, position)
    for start in range(first, last, step):
        yield start, source.read_keys(position, start, min(start + step, last))


def cut_tiles(
    source: Source, position: int, first: int, last: int, threshold: Threshold
) -> Iterator[TileRun]:
    """The tiles [first, last), whole bands, which are cut at a threshold.

    Cost: one read.
    """
    for start, keys in read_tiles(source, position, first, last):
        yield TileRun(start, keys, threshold.lowest(keys))


def rank_tiles(
    source: Source, position: int, first: int, last: int, groups: Groups
) -> Iterator[TileRun | None]:
    """The tiles [first, last), whole groups, each of which is ranked on its own.

    Yields None where tiles were read that a later run has.

    Cost: one read; two for columns of a block, and five for runs, of more than about 4 million
    tiles. Memory of about 25 bytes for each tile of a group, or of several megabytes.
    """
    if is_too_large(groups):
        yield from _rank_columns(source, position, first, last, groups)
        return
    if groups.size > MAX_IN_MEMORY:
        for start in range(first, last, groups.size):
            what = source, position, start, start + groups.size
            threshold = yield from find_threshold(*what, groups.num_pruned)
            yield from cut_tiles(*what, threshold)
        return
    bands = source.bands_of(position)
    assert bands is not None
    step = max(CHUNK // (groups.block * bands.tile_size), 1) * groups.block
    scratch = Scratch()
    for start in range(first, last, step):
        pieces = []
        for keys, _ in source.chunks_of_keys(position, start, min(start + step, last)):
            pieces.append(keys)
            yield None
        keys = np.concatenate(pieces)
        yield TileRun(start, keys, lowest_of(groups, keys, scratch))


def _rank_columns(
    source: Source, position: int, first: int, last: int, groups: Groups
) -> Iterator[TileRun | None]:
    for start in range(first, last, groups.block):
        cuts = ColumnCuts(source, position, start, groups)
        yield from cuts.find()
        for number, keys in read_tiles(source, position, start, start + groups.block):
            yield TileRun(number, keys, cuts.lowest(keys))


def _step_of(source: Source, position: int) -> int:
    """Tiles of a run: whole bands, about a chunk of elements."""
    bands = source.bands_of(position)
    assert bands is not None
    return max(CHUNK // bands.size, 1) * bands.num_tiles
