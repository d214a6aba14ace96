"""Which statistics of activations belong to which tensors of a checkpoint.

Statistics have the names of a model's parameters, which are those of the checkpoint's tensors,
except that one of the two may have the prefix of a base model: "model." before each name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distprune._common.element_groups import Layout, layout_along
from distprune.files.errors import CheckpointError, SelectionError, headline
from distprune.files.formats.header import TensorEntry
from distprune.files.formats.statistics_file import (
    EXPERT_LAYOUTS,
    StoredStatistics,
    read_statistics,
)

_MAX_PROBLEMS = 12
_NUM_SHOWN = 5


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of activations, by tensor.

    Attributes:
        path: of the file.
        sha256: of its bytes.
        mode: "one_pass" or "sequential".
        of_tensor: by name of the tensor.
        warnings: sentences on what is no error, but probably not meant.
    """

    path: str
    sha256: str
    mode: str
    of_tensor: Mapping[str, StoredStatistics]
    warnings: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The tokens that most layers saw; experts may have seen fewer."""
        return max((stored.most_tokens for stored in self.of_tensor.values()), default=0)

    def facts(self) -> dict[str, Any]:
        """What decides the scores, as JSON."""
        return {"sha256": self.sha256, "mode": self.mode, "num_tokens": self.num_tokens}

    def read_bytes(self) -> bytes:
        """The file again.

        Raises:
            CheckpointError: it has changed, or is gone.
        """
        try:
            raw = Path(self.path).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error
        if hashlib.sha256(raw).hexdigest() != self.sha256:
            raise CheckpointError(
                f"{self.path} has changed since it was opened; expected statistics that stay as "
                "they are."
            )
        return raw


def match_statistics(
    path: str, tensors: Sequence[tuple[TensorEntry, Layout | None]], names: Collection[str]
) -> TensorStatistics:
    """Read statistics, and find those of some tensors.

    Args:
        path: of the file.
        tensors: that need them, with the place of their inputs if that is known.
        names: of all tensors of the checkpoint.

    Raises:
        SelectionError: a tensor has no statistics, or those of another weight; names all.
        CheckpointError: the file cannot be read, or is malformed.

    Cost: two reads of the file, and as much memory.
    """
    sha256 = _sha256(path)
    mode, stored = read_statistics(path)
    prefix = _prefix([entry.name for entry, _ in tensors], stored)
    own = {prefix(name): name for name in names}
    found = {own[label]: of_one for label, of_one in stored.items() if label in own}
    problems = []
    for entry, layout in tensors:
        if entry.name not in found:
            problems.append(
                f"{entry.name} has no statistics; calibrate a model with this layer, or exclude "
                "the tensor."
            )
        elif problem := _misfit(entry, layout, found[entry.name]):
            problems.append(problem)
    if problems:
        num_more = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS]
        shown += [f"{num_more} more tensors."] if num_more > 0 else []
        shown.append(f"It has statistics of {_listed(list(stored)) or 'nothing'}.")
        raise SelectionError(headline(f"the file of statistics {path}", problems), shown)
    needed = {entry.name: found[entry.name] for entry, _ in tensors}
    others = [label for label in stored if label not in own]
    return TensorStatistics(path, sha256, mode, needed, _warnings(path, needed, others))


class _Prefix:
    """How the name of a tensor becomes that of a parameter."""

    def __init__(self, added: str = "", removed: str = "") -> None:
        self._added = added
        self._removed = removed

    def __call__(self, name: str) -> str:
        if self._removed:
            return name.removeprefix(self._removed)
        return self._added + name


def _prefix(tensors: Sequence[str], stored: Collection[str]) -> _Prefix:
    """The prefix that one of the sides has; none if names are equal, or none is unambiguous."""
    missing = [name for name in tensors if name not in stored]
    if not missing or len(missing) < len(tensors):
        return _Prefix()
    first = missing[0]
    added = {label.removesuffix(first) for label in stored if label.endswith(f".{first}")}
    removed = {first.removesuffix(label) for label in stored if first.endswith(f".{label}")}
    candidates = [_Prefix(added=prefix) for prefix in added if prefix.count(".") == 1]
    candidates += [_Prefix(removed=prefix) for prefix in removed if prefix.count(".") == 1]
    fitting = [prefix for prefix in candidates if all(prefix(name) in stored for name in tensors)]
    return fitting[0] if len(fitting) == 1 else _Prefix()


def _misfit(entry: TensorEntry, layout: Layout | None, stored: StoredStatistics) -> str:
    """Why statistics are those of another weight; "" if they fit."""
    if stored.shape != entry.shape:
        return (
            f"{entry.name} has the shape {list(entry.shape)}, and its statistics are those of a "
            f"weight of shape {list(stored.shape)}; expected statistics of this model."
        )
    if stored.layout in EXPERT_LAYOUTS:
        return f"{entry.name}: its statistics are those of fused experts, which are not supported."
    dims = [0] if stored.layout == "conv1d_of_transformers" else list(range(1, len(entry.shape)))
    if layout is not None and layout != layout_along(entry.name, entry.shape, dims):
        return (
            f"{entry.name}: its statistics say that the inputs are along the dimensions {dims} "
            f"({stored.layout}), and the selection says otherwise; correct input_dims "
            "(--input-dim)."
        )
    return ""


def _warnings(
    path: str, needed: Mapping[str, StoredStatistics], others: Sequence[str]
) -> tuple[str, ...]:
    warnings = []
    empty = [name for name, stored in needed.items() if not stored.most_tokens]
    if empty:
        warnings.append(
            f"no token came to {_listed(empty)} in {path}: all scores are zero, so that these "
            "tensors are pruned first, in the order of their elements. Calibrate on more text, or "
            "exclude them."
        )
    if others:
        warnings.append(
            f"{path} has statistics of {_listed(others)}, which the checkpoint does not have; "
            "expected statistics of this model."
        )
    return tuple(warnings)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


def _sha256(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
