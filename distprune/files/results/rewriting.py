"""Selected tensors, written again with zeros in the pruned elements, and their masks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distprune._common.element_groups import Groups
from distprune._common.lowest_of_groups import lowest_of
from distprune._common.memory import Scratch
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskLayout, MaskWriter
from distprune.files.disk.access import WRITE
from distprune.files.disk.open_files import OpenFiles, write_from
from distprune.files.errors import SelectionError
from distprune.files.planning import Plan
from distprune.files.ranking.columns import ColumnCuts, is_too_large
from distprune.files.ranking.cutting import Cutting
from distprune.files.ranking.descending import find_threshold
from distprune.files.ranking.group_cuts import GroupCuts
from distprune.files.ranking.groups import groups_of
from distprune.files.ranking.keys import Array
from distprune.files.ranking.lowest import Threshold
from distprune.files.ranking.streaming import CHUNK, MAX_IN_MEMORY, Source, nan_error
from distprune.files.ranking.tile_runs import TileRun, cut_tiles, rank_tiles
from distprune.files.ranking.tiles import Bands
from distprune.files.ranking.units import Span, SpanUnit

# Index of the first element, stored bits, and which elements are pruned.
Piece = tuple[int, Array, Array]


class Rewriter:
    """Prunes units, one after the other; see ``resuming.Worker``.

    Args:
        plan: what to do.
        source: of the plan.
        folder: where to write; its files exist and have their sizes.
        layout: of the mask file; None: no masks.
        group_cuts: of the groups that are ranked together; None if there are none.
    """

    def __init__(
        self,
        plan: Plan,
        source: Source,
        folder: Path,
        layout: MaskLayout | None,
        group_cuts: GroupCuts | None,
    ) -> None:
        self.outputs = OpenFiles(WRITE)
        self._plan = plan
        self._source = source
        self._folder = folder
        self._layout = layout
        self._group_cuts = group_cuts
        self._record: dict[str, dict[int, int]] = {}

    def rewrite(self, number: int, unit: SpanUnit) -> Iterator[int]:
        """Do a unit; yields bytes. Then :meth:`record` returns its counts."""
        self._record = {"pruned": {}, "nan": {}, "zero": {}, "threshold": {}}
        group = self._plan.tensors[unit.spans[0].position].group
        cutting = None
        if self._plan.groups[group].recipe.is_together:
            assert self._group_cuts is not None
            cutting = Cutting(self._plan, self._source, self._group_cuts, group, number)
        for span in unit.spans:
            masks = self._mask_writer(span)
            for piece in self._pieces(span, cutting):
                if piece is None:
                    yield 0
                    continue
                first, bits, lowest = piece
                self._write(span, first, bits, lowest, masks)
                yield bits.nbytes
            if masks is not None:
                masks.finish()

    def record(self) -> dict[str, Any]:
        """Counts of the last unit, by position of a tensor.

        How many elements were pruned; how many are NaN, of tensors that are ranked on their own;
        how many were zero in the source; and the largest key that was pruned, of tensors with a
        threshold of their own.
        """
        return {what: counts for what, counts in self._record.items() if counts}

    def _write(
        self, span: Span, first: int, bits: Array, lowest: Array, masks: MaskWriter | None
    ) -> None:
        """Write a piece without its lowest elements; overwrites ``bits``."""
        entry = self._plan.tensors[span.position].entry
        keep = ~lowest
        num_zero = len(bits) - int(np.count_nonzero(bits << 1))  # without the sign bit
        if num_zero:
            self._count("zero", span.position, num_zero)
        np.multiply(bits, keep, out=bits)  # pruned bits are 0, so +0 whatever the sign was
        start = entry.start + first * self._source.itemsize(span.position)
        write_from(self.outputs, str(self._folder / entry.file), start, bits.data)
        if masks is not None:
            masks.add(keep)
        self._count("pruned", span.position, int(np.count_nonzero(lowest)))

    def _pieces(self, span: Span, cutting: Cutting | None) -> Iterator[Piece | None]:
        """The elements of a span in order; None where a chunk was read only to be counted."""
        bands = self._source.bands_of(span.position)
        if bands is not None:
            yield from self._tiles(span, cutting, bands)
            return
        if cutting is not None:
            yield from self._cut_at(span, cutting.threshold(span))
            return
        recipe = self._plan.recipe_of(span.position)
        groups = groups_of(self._plan.tensors[span.position], recipe)
        if is_too_large(groups):
            yield from self._cut_columns(span, groups)
        elif groups.size <= MAX_IN_MEMORY:
            yield from self._rank_in_memory(span, groups)
        else:
            yield from self._cut_large_groups(span, groups)

    def _tiles(self, span: Span, cutting: Cutting | None, bands: Bands) -> Iterator[Piece | None]:
        """Whole bands of tiles, whose elements are read again when it is known which tiles go."""
        position = span.position
        what = self._source, position, *self._source.items_of(position, span.first, span.last)
        runs: Iterator[TileRun | None]
        if cutting is not None:
            runs = cut_tiles(*what, cutting.threshold(span))
        else:
            tensor, recipe = self._plan.tensors[position], self._plan.recipe_of(position)
            runs = rank_tiles(*what, groups_of(tensor, recipe))
        for run in runs:
            if run is None:
                yield None
                continue
            if cutting is None:
                self._check(span, run.keys, run.lowest)
            start = run.first * bands.tile_size
            for first, lowest in bands.spread(run.lowest, start, CHUNK):
                yield first, self._source.read_bits(position, first, first + len(lowest)), lowest

    def _cut_large_groups(self, span: Span, groups: Groups) -> Iterator[Piece | None]:
        """Groups that are runs too large to hold: each is counted, and then read again."""
        for first in range(span.first, span.last, groups.size):
            group = Span(span.position, first, first + groups.size)
            threshold = yield from find_threshold(
                self._source, span.position, group.first, group.last, groups.num_pruned
            )
            yield from self._cut_at(group, threshold)

    def _cut_columns(self, span: Span, groups: Groups) -> Iterator[Piece | None]:
        """Groups that are interleaved in blocks too large to hold."""
        for start in range(span.first, span.last, groups.block):
            cuts = ColumnCuts(self._source, span.position, start, groups)
            yield from cuts.find()
            for first in range(start, start + groups.block, cuts.step):
                last = min(first + cuts.step, start + groups.block)
                bits = self._source.read_bits(span.position, first, last)
                keys = self._source.keys_of(span.position, first, bits)
                lowest = cuts.lowest(keys)
                self._check(span, keys, lowest)
                yield first, bits, lowest

    def _cut_at(self, span: Span, threshold: Threshold) -> Iterator[Piece]:
        is_ranked_alone = self._plan.tensors[span.position].num_groups > 0
        for first in range(span.first, span.last, CHUNK):
            last = min(first + CHUNK, span.last)
            bits = self._source.read_bits(span.position, first, last)
            keys = self._source.cut_keys_of(span.position, first, bits)
            lowest = threshold.lowest(keys)
            if is_ranked_alone:
                self._check(span, keys, lowest)
            yield first, bits, lowest

    def _rank_in_memory(self, span: Span, groups: Groups) -> Iterator[Piece]:
        step = max(CHUNK // groups.block, 1) * groups.block
        scratch = Scratch()
        for first in range(span.first, span.last, step):
            last = min(first + step, span.last)
            bits = self._source.read_bits(span.position, first, last)
            keys = self._source.keys_of(span.position, first, bits)
            lowest = lowest_of(groups, keys, scratch)
            self._check(span, keys, lowest)
            yield first, bits, lowest

    def _check(self, span: Span, keys: Array, lowest: Array) -> None:
        """Refuse or count NaN in a tensor that is ranked on its own, and note its threshold."""
        key_format = self._source.format_of(span.position)
        tensor = self._plan.tensors[span.position]
        num_nan = key_format.count_nan(keys)
        if num_nan and self._plan.recipe.nan == "error":
            raise nan_error(self._plan, [span.position])
        if num_nan:
            self._count("nan", span.position, num_nan)
            if key_format.count_nan(keys[lowest]):
                raise SelectionError(
                    f"{tensor.entry.name}: more of a group is to be pruned than is no NaN, and NaN "
                    "are kept. Lower the sparsity, or exclude the tensor."
                )
        if tensor.num_groups == 1 and lowest.any():
            largest = self._record["threshold"].get(span.position, 0)
            largest = max(largest, int(keys[lowest].max()))
            self._record["threshold"][span.position] = largest

    def _count(self, what: str, position: int, count: int) -> None:
        counts = self._record[what]
        counts[position] = counts.get(position, 0) + count

    def _mask_writer(self, span: Span) -> MaskWriter | None:
        if self._layout is None:
            return None
        start = self._layout.starts[self._plan.tensors[span.position].entry.name]
        path = str(self._folder / MASK_FILE)
        return MaskWriter(self.outputs, path, start + span.first // 8)
