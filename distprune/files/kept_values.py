"""Values that kept elements get in a result, in place of those of the source."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
