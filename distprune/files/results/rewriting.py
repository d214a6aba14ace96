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
from distprune.files.ranking.group_cuts import GroupCuts
from distprune.files.ranking.groups import groups_of
from distprune.files.ranking.histograms import descent_to, key_histogram, narrowed
from distprune.files.ranking.keys import Array
from distprune.files.ranking.lowest import Quota, Threshold
from distprune.files.ranking.streaming import CHUNK, MAX_IN_MEMORY, Source, nan_error
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

    def _cut_large_groups(self, span: Span, groups: Groups) -> Iterator[Piece | None]:
        """Groups that are runs too large to hold: each is counted, and then read again."""
        for first in range(span.first, span.last, groups.size):
            group = Span(span.position, first, first + groups.size)
            descent = descent_to(self._source.format_of(span.position).width, groups.num_pruned)
            num_ties = 0
            while groups.num_pruned and not descent.is_done:
                histogram = np.zeros(descent.num_bins, dtype=np.int64)
                chunks = self._source.chunks_of_keys(group.position, group.first, group.last)
                for keys, _ in chunks:
                    histogram += key_histogram(keys, descent)
                    yield None
                descent, _ = narrowed(descent, histogram)
                num_ties = descent.rank + 1
            yield from self._cut_at(group, Threshold(descent.low, Quota(num_ties)))

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
