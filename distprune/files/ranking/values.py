"""Stored numbers as a source of scores: see ``selection.scores.ScoreSource``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from distprune._common.float_formats import PLAIN_FLOATS
from distprune._common.memory import Array, Runs, Scratch
from distprune.files.disk.open_files import OpenFiles, read_into
from distprune.files.formats.header import TensorEntry


class FileValues:
    """The elements of a stored tensor, which are read when they are needed.

    Args:
        files: opens the files.
        path: of the file.
        entry: of the tensor.
        did: called with the number of bytes after each read.
    """

    # The files are opened and closed as they are needed, and progress is reported.
    is_thread_safe = False
    is_in_memory = False
    tally = None

    def __init__(
        self, files: OpenFiles, path: str, entry: TensorEntry, did: Callable[[int], None]
    ) -> None:
        self._files = files
        self._path = path
        self._entry = entry
        self._did = did
        self.dtype: torch.dtype = getattr(torch, PLAIN_FLOATS[entry.dtype].torch_name)
        self._bits = np.dtype(f"i{self.dtype.itemsize}")
        self._held: tuple[int, Array] | None = None

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        """The elements [start, stop).

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        if self._held is not None:
            first, bits = self._held
            if first <= start and stop <= first + len(bits):
                return self._as_tensor(bits[start - first : stop - first])
        bits = (scratch or Scratch()).array("read", stop - start, self._bits)
        self._read(start, bits)
        self._did(bits.nbytes)
        return self._as_tensor(bits)

    def gather(self, runs: Runs) -> Tensor:
        """The elements of some runs."""
        bits = np.empty((len(runs.numbers), runs.length), dtype=self._bits)
        starts = runs.start + runs.numbers.numpy() * runs.length
        offsets = (self._entry.start + starts * self._bits.itemsize).tolist()
        for row, offset in zip(bits, offsets, strict=True):
            read_into(self._files, self._path, offset, row.data.cast("B"))
        self._did(bits.nbytes)
        return self._as_tensor(bits.reshape(-1))

    def read_bits(self, start: int, stop: int) -> Array:
        """The elements [start, stop) as unsigned integers, a fresh array."""
        bits = np.empty(stop - start, dtype=self._bits)
        self._read(start, bits)
        unsigned: Array = bits.view(f"u{self._bits.itemsize}")
        return unsigned

    @contextlib.contextmanager
    def holding(self, start: int, bits: Array) -> Iterator[None]:
        """Do not read elements again that :meth:`read_bits` has returned."""
        self._held = start, bits.view(self._bits)
        try:
            yield
        finally:
            self._held = None

    def _read(self, start: int, bits: Array) -> None:
        offset = self._entry.start + start * self._bits.itemsize
        read_into(self._files, self._path, offset, bits.data.cast("B"))

    def _as_tensor(self, bits: Array) -> Tensor:
        return torch.from_numpy(bits).view(self.dtype)
