"""The bytes of tensors on disk, a few megabytes at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.disk.open_files import OpenFiles, read_into
from distprune.files.formats.header import TensorEntry

_CHUNK = 4 << 20  # bytes
_GOLDEN = 0.6180339887498949
# A tensor and some of its bytes, valid until the next sample.
Sample = tuple[TensorEntry, np.ndarray]


class Scanner:
    """Reads tensors of one checkpoint.

    Args:
        checkpoint: its files are opened when they are needed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._paths = {file.name: file.path for file in checkpoint.files}
        self._files = OpenFiles(os.O_RDONLY)
        self._buffer = np.empty(_CHUNK, np.uint8)

    def chunks(self, entry: TensorEntry, multiple: int = 16) -> Iterator[np.ndarray]:
        """The bytes of a tensor, in order: uint8, each chunk valid until the next one.

        Args:
            entry: a tensor of the checkpoint.
            multiple: chunks, except the last, have a multiple of so many bytes; the buffer grows
                if it is smaller than one multiple.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        step = max(_CHUNK // multiple, 1) * multiple
        for start in range(entry.start, entry.stop, step):
            yield self._read(entry, start, min(start + step, entry.stop))

    def sample(self, entries: Sequence[TensorEntry], max_bytes: int) -> Iterator[Sample]:
        """Chunks of tensors, in order: all of them, or a sample spread evenly over all tensors.

        Args:
            entries: tensors of the checkpoint.
            max_bytes: roughly the most bytes to read.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        pieces = [
            (entry, start, min(start + _CHUNK, entry.stop))
            for entry in entries
            for start in range(entry.start, entry.stop, _CHUNK)
        ]
        num_bytes = sum(stop - start for _, start, stop in pieces)
        fraction = max_bytes / max(num_bytes, 1)
        for number, (entry, start, stop) in enumerate(pieces):
            # Multiples of the golden ratio modulo 1 are even, and not periodic as layers are.
            if fraction >= 1 or number * _GOLDEN % 1 < fraction:
                yield entry, self._read(entry, start, stop)

    def _read(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        if stop - start > len(self._buffer):
            self._buffer = np.empty(stop - start, np.uint8)
        chunk = self._buffer[: stop - start]
        read_into(self._files, self._paths[entry.file], start, chunk.data)
        return chunk

    def close(self) -> None:
        """Close the files."""
        self._files.close()
