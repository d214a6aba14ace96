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
        checkpoint: whose files are opened for reading, when they are needed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._paths = {file.name: file.path for file in checkpoint.files}
        self._files = OpenFiles(os.O_RDONLY)
        self._buffer = np.empty(_CHUNK, np.uint8)

    def chunks(self, entry: TensorEntry, multiple: int = 16) -> Iterator[np.ndarray]:
        """The bytes of a tensor, in order: uint8, each chunk valid until the next one.

        Args:
            entry: a tensor of the checkpoint.
            multiple: chunks, but for the last, have a multiple of so many bytes. One that is
                larger than the buffer makes the buffer larger.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        step = max(_CHUNK // multiple, 1) * multiple
        for start in range(entry.start, entry.stop, step):
            yield self._read(entry, start, min(start + step, entry.stop))

    def sample(self, entries: Sequence[TensorEntry], max_bytes: int) -> Iterator[Sample]:
        """Chunks of tensors, in order: all of them, or a sample that favours no tensor.

        Args:
            entries: tensors of the checkpoint.
            max_bytes: roughly how much to read at most; all of it if that is enough.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        pieces = [
            (entry, start, min(start + _CHUNK, entry.stop))
            for entry in entries
            for start in range(entry.start, entry.stop, _CHUNK)
        ]
        num_bytes = sum(stop - start for _, start, stop in pieces)
        share = max_bytes / max(num_bytes, 1)
        for number, (entry, start, stop) in enumerate(pieces):
            # Multiples of the golden ratio are spread evenly, and keep step with no layer's size.
            if share >= 1 or number * _GOLDEN % 1 < share:
                yield entry, self._read(entry, start, stop)

    def _read(self, entry: TensorEntry, start: int, stop: int) -> np.ndarray:
        if stop - start > len(self._buffer):
            self._buffer = np.empty(stop - start, np.uint8)
        chunk = self._buffer[: stop - start]
        read_into(self._files, self._paths[entry.file], start, memoryview(chunk))
        return chunk

    def close(self) -> None:
        self._files.close()
