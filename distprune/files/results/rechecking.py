"""Whether units that an earlier run recorded as done are on the disk as they were written.

[Note: recheck] A loss of power, a repair of the file system or a clean-up can remove or zero bytes
that were written and recorded. So all of them are read again before a run continues: that is far
less work than to make them, and nothing wrong can be published. Rewritten units are compared by
the crc32 of what was written; copies, whose bytes never pass through the process, with the source.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from distprune.files.checkpoints.mask_files import MASK_FILE
from distprune.files.disk.open_files import OpenFiles, read_into
from distprune.files.errors import CheckpointError
from distprune.files.ranking.units import CopyUnit, SpanUnit, Unit
from distprune.files.results.task import Task

_PIECE = 4 << 20
# Number of a unit, and by name of a file the crc32 of what it wrote there.
Recorded = tuple[int, dict[str, int]]


class Rechecker:
    """Checks units that are recorded as done.

    Args:
        task: that they belong to.
        folder: where they were written.
        sources: files of the source, opened for reading.

    Attributes:
        damaged: numbers of the units that are not as they were written.
    """

    def __init__(self, task: Task, folder: Path, sources: OpenFiles) -> None:
        self.damaged: list[int] = []
        self._task = task
        self._folder = folder
        self._sources = sources
        self._outputs = OpenFiles(os.O_RDONLY | os.O_NOFOLLOW)
        self._buffers = [np.empty(_PIECE, np.uint8) for _ in range(2)]

    def steps(self, recorded: Sequence[Recorded]) -> Iterator[int]:
        """Check units; yields the bytes that were processed.

        Raises:
            CheckpointError: the source cannot be read.
        """
        for number, checksums in recorded:
            unit = self._task.units[number]
            seen = 0
            for is_good, num_bytes in self._check(unit, checksums):
                seen += num_bytes
                yield num_bytes
                if not is_good:
                    self.damaged.append(number)
                    break
            yield unit.num_bytes - seen

    def close(self) -> None:
        """Close the files of the result."""
        self._outputs.close()

    def _check(self, unit: Unit, checksums: dict[str, int]) -> Iterator[tuple[bool, int]]:
        """For every piece: whether it is good, as far as is known yet; and its bytes."""
        if isinstance(unit, CopyUnit):
            yield from self._check_copy(unit)
        else:
            yield from self._check_rewritten(unit, checksums)

    def _check_copy(self, unit: CopyUnit) -> Iterator[tuple[bool, int]]:
        for first in range(unit.start, unit.stop, _PIECE):
            written = self._read(unit.name, first, min(first + _PIECE, unit.stop))
            if written is None:
                yield False, 0
                return
            expected = self._buffers[1][: len(written)]
            read_into(self._sources, unit.path, first, expected.data)
            yield np.array_equal(written, expected), len(written)

    def _check_rewritten(
        self, unit: SpanUnit, checksums: dict[str, int]
    ) -> Iterator[tuple[bool, int]]:
        ranges = self._task.ranges(unit)
        if set(ranges) != set(checksums):
            yield False, 0
            return
        for name, pieces in ranges.items():
            checksum = 0
            for start, stop in pieces:
                for first in range(start, stop, _PIECE):
                    written = self._read(name, first, min(first + _PIECE, stop))
                    if written is None:
                        yield False, 0
                        return
                    checksum = zlib.crc32(written.data, checksum)
                    yield True, len(written) if name != MASK_FILE else 0
            yield checksum == checksums[name], 0

    def _read(self, name: str, start: int, stop: int) -> np.ndarray | None:
        """Bytes of an output; None if it cannot be read."""
        buffer = self._buffers[0][: stop - start]
        try:
            read_into(self._outputs, str(self._folder / name), start, buffer.data)
        except CheckpointError:
            return None
        return buffer
