"""Compare two checkpoints: tensors, zeros, values and metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from distprune._common.float_formats import PLAIN_FLOATS
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.scanning import Scanner
from distprune.files.formats.header import TensorEntry


@dataclass(frozen=True)
class TensorDifference:
    """Two tensors of one name, element by element.

    Attributes:
        name: of both.
        numel: elements of each; 0 if there is a ``problem``.
        num_differing: elements whose bits differ.
        num_zero_in_both: elements that are +0 or -0 in both.
        num_zero_in_first, num_zero_in_second: elements that are zero in that one only.
        problem: why they cannot be compared: another shape or dtype, or one is missing.
    """

    name: str
    numel: int = 0
    num_differing: int = 0
    num_zero_in_both: int = 0
    num_zero_in_first: int = 0
    num_zero_in_second: int = 0
    problem: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether the tensors are equal bit for bit."""
        return not self.problem and not self.num_differing


def compare(
    first: Checkpoint,
    second: Checkpoint,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[TensorDifference]:
    """Compare all tensors by name, in the order of the first checkpoint.

    Tensors may be in other files and in another order. Zeros are counted in plain floats only.

    Args:
        first, second: from ``open_checkpoint``.
        on_bytes: called with numbers of bytes that were read, of both together.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.

    Cost: one read of each; about 50 MB of memory.
    """
    ours = {entry.name: entry for entry in first.tensors}
    theirs = {entry.name: entry for entry in second.tensors}
    with closing(Scanner(first)) as one, closing(Scanner(second)) as two:
        for name, entry in ours.items():
            other = theirs.get(name)
            if other is None:
                yield TensorDifference(name, problem="only in the first")
            elif (entry.dtype, entry.shape) != (other.dtype, other.shape):
                yield TensorDifference(name, problem=f"{_described(entry)}; {_described(other)}")
            else:
                yield _compare(one, two, entry, other, on_bytes)
    for name in theirs:
        if name not in ours:
            yield TensorDifference(name, problem="only in the second")


def _compare(
    one: Scanner,
    two: Scanner,
    entry: TensorEntry,
    other: TensorEntry,
    on_bytes: Callable[[int], None],
) -> TensorDifference:
    form = PLAIN_FLOATS.get(entry.dtype)
    differing, both, first, second = 0, 0, 0, 0
    for ours, theirs in zip(one.chunks(entry), two.chunks(other), strict=True):
        if form is not None:
            is_zero, is_zero_there = form.magnitudes(ours) == 0, form.magnitudes(theirs) == 0
            ours, theirs = ours.view(form.bits), theirs.view(form.bits)
            both += int(np.count_nonzero(is_zero & is_zero_there))
            first += int(np.count_nonzero(is_zero & ~is_zero_there))
            second += int(np.count_nonzero(~is_zero & is_zero_there))
        elif entry.numel and entry.nbytes % entry.numel == 0:
            width = entry.nbytes // entry.numel
            ours, theirs = ours.reshape(-1, width), theirs.reshape(-1, width)
        differs = ours != theirs
        differing += int(np.count_nonzero(differs.any(1) if differs.ndim > 1 else differs))
        on_bytes(2 * ours.nbytes)
    return TensorDifference(entry.name, entry.numel, differing, both, first, second)


def compare_metadata(
    first: Checkpoint, second: Checkpoint
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """The ``__metadata__`` of the headers, where it differs.

    Returns:
        By key, its distinct values in the files of the first and of the second checkpoint.
    """
    ours, theirs = _metadata(first), _metadata(second)
    return {
        key: (ours.get(key, ()), theirs.get(key, ()))
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    }


def _metadata(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    values: dict[str, set[str]] = {}
    for file in checkpoint.files:
        for key, value in file.metadata.items():
            values.setdefault(key, set()).add(value)
    return {key: tuple(sorted(texts)) for key, texts in values.items()}


def _described(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"
