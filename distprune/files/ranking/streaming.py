"""Selected tensors, a few megabytes at a time: their bits and their keys."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from distprune.files.disk.access import OpenFiles, read_into
from distprune.files.errors import NaNError
from distprune.files.planning import Plan
from distprune.files.ranking.scores import (
    HASHES,
    Array,
    KeyFormat,
    bits_dtype,
    hash_seed,
    key_format,
    magnitude_keys,
    random_keys,
)

CHUNK = 1 << 19  # elements: the arrays of a step stay below fifty megabytes
# A group of more elements, ranked on its own, is counted in one read and cut in another.
MAX_IN_MEMORY = 8 * CHUNK


class Source:
    """The selected tensors of a plan, read in pieces.

    Args:
        plan: what to do.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._files = OpenFiles(os.O_RDONLY)
        self._paths = {file.name: file.path for file in plan.checkpoint.files}
        self._seed = hash_seed(plan.recipe.seed) if plan.recipe.seed is not None else None
        self._formats = [
            key_format(tensor.entry.dtype for tensor in plan.tensors[group.first : group.last])
            for group in plan.groups
        ]

    @property
    def files(self) -> OpenFiles:
        """For whoever copies the rest."""
        return self._files

    def needs_values(self, group: int) -> bool:
        """Whether the scores of a group depend on what is stored."""
        return self._plan.groups[group].recipe.score != "random"

    def format(self, position: int | None = None, *, group: int = 0) -> KeyFormat:
        """Of the keys of a tensor that is ranked on its own.

        Args:
            position: of the tensor; None: the format is that of all tensors of the group, ranked
                together.
            group: only where there is no position.
        """
        group = group if position is None else self._plan.tensors[position].group
        if not self.needs_values(group):
            return HASHES
        if position is None:
            return self._formats[group]
        return key_format([self._plan.tensors[position].entry.dtype])

    def bits(self, position: int, first: int, last: int) -> Array:
        """The elements [first, last) as they are stored: unsigned integers, a fresh array.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        entry = self._plan.tensors[position].entry
        dtype = bits_dtype(entry.dtype)
        bits = np.empty(last - first, dtype=dtype)
        offset = entry.start + first * dtype.itemsize
        view = memoryview(bits).cast("B")
        read_into(self._files, self._paths[entry.file], offset, view)
        return bits

    def keys(self, position: int, first: int, bits: Array | None, size: int, own: bool) -> Array:
        """Keys of elements from ``first`` on.

        Args:
            bits: as :meth:`bits` returns them; None where values are not needed.
            size: how many elements.
            own: in the format of this tensor, not of its group.
        """
        tensor = self._plan.tensors[position]
        if not self.needs_values(tensor.group):
            assert self._seed is not None
            start = tensor.offset + first
            return random_keys(start, start + size, self._seed)
        assert bits is not None
        wanted = self.format(position) if own else self.format(group=tensor.group)
        return magnitude_keys(bits, tensor.entry.dtype, wanted)

    def chunks_of_keys(
        self, position: int, first: int, last: int, own: bool
    ) -> Iterator[tuple[Array, int]]:
        """Keys of the elements [first, last), piece by piece, and the bytes of each piece."""
        for start in range(first, last, CHUNK):
            stop = min(start + CHUNK, last)
            needs_values = self.needs_values(self._plan.tensors[position].group)
            bits = self.bits(position, start, stop) if needs_values else None
            keys = self.keys(position, start, bits, stop - start, own)
            yield keys, (stop - start) * self.itemsize(position)

    def itemsize(self, position: int) -> int:
        return bits_dtype(self._plan.tensors[position].entry.dtype).itemsize

    def count_nan(self, keys: Array, wanted: KeyFormat) -> int:
        """How many keys are those of NaN."""
        if not wanted.value_dtype:
            return 0
        return int(np.count_nonzero(keys > keys.dtype.type(wanted.largest_number)))

    def nan_error(self, names: list[str]) -> NaNError:
        """What to raise for tensors that hold NaN."""
        return NaNError(
            f"NaN in {', '.join(names)}; a NaN has no place in a ranking. Repair the checkpoint, "
            "exclude the tensor, or keep NaN as they are (nan: keep)."
        )

    def close(self) -> None:
        self._files.close()
