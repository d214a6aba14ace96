"""Source, result and masks, read side by side; what differs is counted, and not judged."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np

from distprune._common.element_groups import Groups
from distprune._common.lowest_of_groups import lowest_of
from distprune._common.memory import Scratch
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskFile, MaskLayout, read_keep
from distprune.files.checks.boundary import Boundary
from distprune.files.checks.findings import Findings
from distprune.files.disk.open_files import OpenFiles, read_into
from distprune.files.planning import Plan
from distprune.files.ranking.columns import ColumnCuts, is_too_large
from distprune.files.ranking.groups import groups_of
from distprune.files.ranking.keys import Array
from distprune.files.ranking.streaming import CHUNK, MAX_IN_MEMORY, Source
from distprune.files.ranking.tile_runs import rank_tiles, read_tiles
from distprune.files.ranking.tiles import Bands
from distprune.files.ranking.units import CopyUnit, Span, SpanUnit

_PIECE = 8 << 20  # bytes


class SideBySide:
    """Compares units of work.

    Args:
        plan: of the source.
        source: of the plan.
        folder: the result; its files have their sizes.
        layout: of its masks.
        outputs: opens the result's files for reading.

    Attributes:
        findings: of the units that have been compared.
    """

    def __init__(
        self, plan: Plan, source: Source, folder: Path, layout: MaskLayout, outputs: OpenFiles
    ) -> None:
        self.findings = Findings(plan)
        self._plan = plan
        self._source = source
        self._folder = folder
        self._outputs = outputs
        shapes = {tensor.entry.name: tensor.entry.shape for tensor in plan.tensors}
        self._masks = MaskFile(str(folder / MASK_FILE), shapes, {}, layout.starts)

    def compare_copied(self, unit: CopyUnit) -> Iterator[int]:
        """Read bytes that have to be equal; yields the bytes."""
        path = str(self._folder / unit.name)
        for start in range(unit.start, unit.stop, _PIECE):
            size = min(_PIECE, unit.stop - start)
            expected, result = (np.empty(size, dtype=np.uint8) for _ in range(2))
            read_into(self._source.files, unit.path, start, expected.data)
            read_into(self._outputs, path, start, result.data)
            different = np.flatnonzero(expected != result)
            if len(different):
                first = start + int(different[0])
                self.findings.add_difference(unit.name, len(different), first)
            self.findings.num_bytes += size
            yield size

    def compare_pruned(self, unit: SpanUnit) -> Iterator[int]:
        """Read elements of selected tensors, and their masks; yields the bytes of the source."""
        for span in unit.spans:
            tensor = self._plan.tensors[span.position]
            bands = self._source.bands_of(span.position)
            if bands is not None:
                yield from self._compare_tiles(span, bands)
                continue
            if tensor.num_groups == 0:
                boundary = self.findings.boundaries.setdefault(span.position, Boundary())
                yield from self._find_boundary(span, boundary, tensor.offset)
                continue
            groups = groups_of(tensor, self._plan.recipe_of(span.position))
            if is_too_large(groups):
                yield from self._rank_columns(span, groups)
            elif groups.size <= MAX_IN_MEMORY:
                yield from self._rank_in_memory(span, groups)
            else:
                yield from self._check_large_groups(span, groups)

    def _compare_tiles(self, span: Span, bands: Bands) -> Iterator[int]:
        """Whole bands of tiles: their elements, and the order of their sums."""
        position, findings = span.position, self.findings
        tensor = self._plan.tensors[position]
        what = self._source, position, *self._source.items_of(position, span.first, span.last)
        if tensor.num_groups == 0:
            boundary = findings.boundaries.setdefault(position, Boundary())
            for first, keys in read_tiles(*what):
                keep = yield from self._kept_tiles(position, bands, first, len(keys))
                self._look_at_keys(position, keys, keep)
                boundary.add(keys, keep, tensor.offset + first)
        else:
            groups = groups_of(tensor, self._plan.recipe_of(position))
            for run in rank_tiles(*what, groups):
                if run is None:
                    yield 0
                    continue
                keep = yield from self._kept_tiles(position, bands, run.first, len(run.keys))
                self._look_at_keys(position, run.keys, keep)
                self._add_misplaced(position, run.lowest, keep)
        self._look_at_tail(span)

    def _kept_tiles(
        self, position: int, bands: Bands, first: int, count: int
    ) -> Generator[int, None, Array]:
        """Which tiles of whole bands are kept; compares the values on the way."""
        kept: list[Array] = []
        step = max(CHUNK // bands.row_size, 1) * bands.row_size
        start, stop = first * bands.tile_size, (first + count) * bands.tile_size
        num_elements = max(CHUNK // bands.size, 1) * bands.size
        for begin in range(start, stop, num_elements):
            end = min(begin + num_elements, stop)
            keeps = []
            for row in range(begin, end, step):
                bits, keep = self._read_piece(position, row, min(row + step, end))
                keeps.append(keep)
                yield bits.nbytes
            tiles, num_torn = bands.collapse(np.concatenate(keeps))
            self.findings.add("torn", position, num_torn)
            kept.append(tiles)
        return np.concatenate(kept)

    def _find_boundary(self, span: Span, boundary: Boundary, offset: int) -> Iterator[int]:
        """Elements whose order their boundary tells; ``offset`` is the place of index 0."""
        for first, keys, keep, num_bytes in self._pieces(span, CHUNK):
            boundary.add(keys, keep, offset + first)
            yield num_bytes

    def _check_large_groups(self, span: Span, groups: Groups) -> Iterator[int]:
        """Groups that are runs too large to hold."""
        for first in range(span.first, span.last, groups.size):
            boundary = Boundary()
            group = Span(span.position, first, first + groups.size)
            yield from self._find_boundary(group, boundary, 0)
            self.findings.add("disordered", span.position, int(not boundary.is_ordered))
            is_miscounted = boundary.num_pruned != groups.num_pruned
            self.findings.add("miscounted", span.position, int(is_miscounted))

    def _rank_columns(self, span: Span, groups: Groups) -> Iterator[int]:
        """Groups that are interleaved in blocks too large to hold."""
        for start in range(span.first, span.last, groups.block):
            cuts = ColumnCuts(self._source, span.position, start, groups)
            for _ in cuts.find():
                yield 0
            block = Span(span.position, start, start + groups.block)
            for _, keys, keep, num_bytes in self._pieces(block, cuts.step):
                self._add_misplaced(span.position, cuts.lowest(keys), keep)
                yield num_bytes

    def _rank_in_memory(self, span: Span, groups: Groups) -> Iterator[int]:
        step = max(CHUNK // groups.block, 1) * groups.block
        scratch = Scratch()
        for _, keys, keep, num_bytes in self._pieces(span, step):
            self._add_misplaced(span.position, lowest_of(groups, keys, scratch), keep)
            yield num_bytes

    def _add_misplaced(self, position: int, lowest: Array, keep: Array) -> None:
        self.findings.add("misplaced", position, int(np.count_nonzero(lowest == keep)))

    def _pieces(self, span: Span, step: int) -> Iterator[tuple[int, Array, Array, int]]:
        """(first element, keys, keep, bytes) in order; compares the values on the way."""
        position = span.position
        for first in range(span.first, span.last, step):
            bits, keep = self._read_piece(position, first, min(first + step, span.last))
            keys = self._source.keys_of(position, first, bits)
            self._look_at_keys(position, keys, keep)
            yield first, keys, keep, bits.nbytes
        self._look_at_tail(span)

    def _read_piece(self, position: int, first: int, last: int) -> tuple[Array, Array]:
        """Elements of the source, and which of them are kept; compares the values."""
        findings, name = self.findings, self._plan.tensors[position].entry.name
        bits = self._source.read_bits(position, first, last)
        keep = read_keep(self._masks, self._outputs, name, first, last)
        self._compare_values(position, first, bits, keep)
        findings.add("pruned", position, len(keep) - int(np.count_nonzero(keep)))
        findings.add("zero", position, len(bits) - int(np.count_nonzero(bits << 1)))
        findings.num_bytes += bits.nbytes
        return bits, keep

    def _look_at_keys(self, position: int, keys: Array, keep: Array) -> None:
        """Count NaN, and note the threshold of a tensor that is one group."""
        findings, key_format = self.findings, self._source.format_of(position)
        num_nan = key_format.count_nan(keys)
        findings.add("nan", position, num_nan)
        if num_nan:
            findings.add("pruned_nan", position, key_format.count_nan(keys[~keep]))
        if self._plan.tensors[position].num_groups == 1 and not keep.all():
            findings.add_threshold(position, int((keys * ~keep).max()))

    def _look_at_tail(self, span: Span) -> None:
        numel = self._plan.tensors[span.position].entry.numel
        if span.last == numel and span.last % 8:
            self.findings.add("tail", span.position, int(self._has_tail(span.position)))

    def _compare_values(self, position: int, first: int, bits: Array, keep: Array) -> None:
        """The result has the source's bits where an element is kept, and +0 elsewhere."""
        entry = self._plan.tensors[position].entry
        result = np.empty_like(bits)
        start = entry.start + first * self._source.itemsize(position)
        read_into(self._outputs, str(self._folder / entry.file), start, result.data.cast("B"))
        wrong = np.flatnonzero(result != bits * keep)
        if len(wrong):
            self.findings.add_wrong(position, len(wrong), first + int(wrong[0]))

    def _has_tail(self, position: int) -> bool:
        """Whether bits are set after the last element of a mask."""
        entry = self._plan.tensors[position].entry
        last = np.empty(1, dtype=np.uint8)
        offset = self._masks.starts[entry.name] + entry.numel // 8
        read_into(self._outputs, self._masks.path, offset, last.data)
        return bool(last[0] >> entry.numel % 8)
