"""Whether what an earlier run noted as done is on the disk as it was written.

[Note: recheck] A loss of power, a repair of the file system or a clean-up can take away or zero
what was written and noted. All of it is therefore read again before a run goes on: that is far
less work than it was to make, and nothing wrong can be published. Rewritten units are compared by
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
from distprune.files.ranking.units import CopyUnit, Unit
from distprune.files.results.task import Task

_PIECE = 4 << 20
# Number of a unit, and by name of a file the crc32 of what it wrote there.
Noted = tuple[int, dict[str, int]]


class Rechecker:
    """Reads units that are done.

    Args:
        task: what they belong to.
        folder: where they were written.
        sources: files of the source, opened for reading.

    Attributes:
        damaged: numbers of units that are not as they were written.
    """

    def __init__(self, task: Task, folder: Path, sources: OpenFiles) -> None:
        self.damaged: list[int] = []
        self._task = task
        self._folder = folder
        self._sources = sources
        self._outputs = OpenFiles(os.O_RDONLY | os.O_NOFOLLOW)
        self._buffers = [np.empty(_PIECE, np.uint8) for _ in range(2)]

    def steps(self, noted: Sequence[Noted]) -> Iterator[int]:
        """Check units; yields the bytes that were dealt with.

        Raises:
            CheckpointError: the source cannot be read.
        """
        for number, checksums in noted:
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
        self._outputs.close()

    def _check(self, unit: Unit, checksums: dict[str, int]) -> Iterator[tuple[bool, int]]:
        """For every piece: whether it is good, as far as that is known yet; and its bytes."""
        ranges = self._task.ranges(unit)
        is_copy = isinstance(unit, CopyUnit)
        if not is_copy and set(ranges) != set(checksums):
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
                    is_good = True
                    if is_copy:
                        expected = self._buffers[1][: len(written)]
                        read_into(self._sources, unit.path, first, memoryview(expected))
                        is_good = np.array_equal(written, expected)
                    else:
                        checksum = zlib.crc32(written, checksum)
                    yield is_good, len(written) if name != MASK_FILE else 0
            if not is_copy:
                yield checksum == checksums[name], 0

    def _read(self, name: str, start: int, stop: int) -> np.ndarray | None:
        """Bytes of an output; None if it cannot be read."""
        buffer = self._buffers[0][: stop - start]
        try:
            read_into(self._outputs, str(self._folder / name), start, memoryview(buffer))
        except CheckpointError:
            return None
        return buffer
