"""Values that kept elements get in a result, in place of those of the source."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distprune._common.memory import Array
from distprune.files.checkpoints.header import TensorEntry, read_header
from distprune.files.disk.access import OpenFiles, read_into
from distprune.files.errors import CheckpointError


@dataclass(frozen=True)
class KeptValues:
    """What an update of the kept weights has made of some tensors.

    Attributes:
        facts: what decides the values, as JSON: the digest of a plan covers them.
        tensors: the names of the tensors.
        folder: safetensors files with these tensors, in the dtype of the source; None: nobody reads
            them, as where a result is compared with its checksums.
    """

    facts: Mapping[str, Any]
    tensors: tuple[str, ...]
    folder: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """For a report, and for :meth:`from_json`."""
        return {**self.facts, "tensors": list(self.tensors)}

    @classmethod
    def from_json(cls, values: Any) -> KeptValues:
        """What :meth:`as_json` has made.

        Raises:
            CheckpointError: it was something else.
        """
        names = values.get("tensors") if isinstance(values, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError("the report names no tensors whose kept values were changed.")
        facts = {key: value for key, value in values.items() if key != "tensors"}
        return cls(facts, tuple(names))

    @cached_property
    def names(self) -> Collection[str]:
        """The tensors, for lookups."""
        return frozenset(self.tensors)


class ValueReader:
    """Reads kept values piece by piece.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape than in the source.
    """

    def __init__(self, values: KeptValues, entries: Collection[TensorEntry]) -> None:
        assert values.folder is not None
        paths = sorted(values.folder.glob("*.safetensors"))
        files = [read_header(str(path), path.name) for path in paths]
        found = {entry.name: entry for file in files for entry in file.tensors}
        self._entries: dict[str, TensorEntry] = {}
        for entry in entries:
            if entry.name not in values.names:
                continue
            own = found.get(entry.name)
            if own is None or (own.dtype, own.shape) != (entry.dtype, entry.shape):
                has = "is missing" if own is None else f"is {own.dtype} {list(own.shape)}"
                raise CheckpointError(
                    f"{entry.name} {has} in {values.folder}; expected {entry.dtype} "
                    f"{list(entry.shape)}, as in the source."
                )
            self._entries[entry.name] = own
        self._paths = {path.name: str(path) for path in paths}
        self._files = OpenFiles(os.O_RDONLY)

    def read(self, name: str, first: int, bits: Array) -> bool:
        """Replace the bits of a tensor's elements, from ``first`` on; False: it has no values."""
        entry = self._entries.get(name)
        if entry is None:
            return False
        start = entry.start + first * bits.itemsize
        new: Array = np.empty_like(bits)
        read_into(self._files, self._paths[entry.file], start, new.data.cast("B"))
        bits[:] = new
        return True

    def close(self) -> None:
        """Close the files."""
        self._files.close()
