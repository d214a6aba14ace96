"""The numbers of a checkpoint's tensors: zeros, N:M patterns; compared with another's.

Zeros, NaN and infinities are counted in integers, booleans, complex numbers, and floats of 8 and 4
bits as well, which other commands do not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from distprune.base.blocks import Layout
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.disk.access import read_into
from distprune.files.layouts import Layouts, UnknownLayout


@dataclass
class TensorFacts:
    """Counts of the numbers of one tensor.

    Attributes:
        entry: the tensor.
        num_zero: +0 and -0; None for other dtypes than floats of 16 bits and more.
        num_nan, num_inf: NaN and infinities.
        num_groups: by pattern (n, m), the groups of m neighbours along the input dimension. A
            pattern is missing if m does not divide the inputs or their dimension is not known.
        num_kept: by pattern, the groups with at most n nonzero numbers. Groups are counted in plain
            floats of 16 bits and more only.
    """

    entry: TensorEntry
    num_zero: int | None = 0
    num_nan: int = 0
    num_inf: int = 0
    num_groups: dict[tuple[int, int], int] = field(default_factory=dict)
    num_kept: dict[tuple[int, int], int] = field(default_factory=dict)


def inspect(
    checkpoint: Checkpoint,
    patterns: Sequence[tuple[int, int]] = ((2, 4),),
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    input_dims: Iterable[tuple[str, Sequence[int]]] = (),
) -> Iterator[TensorFacts]:
    """Count the numbers of every tensor, in the checkpoint's order.

    Args:
        checkpoint: from ``open_checkpoint``.
        patterns: N:M patterns to count.
        on_bytes: called with numbers of bytes that were read.
        input_dims: as in a recipe, for tensors whose input dimension is not known.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.
        SelectionError: ``input_dims`` do not fit.

    Cost: one read of these tensors; about 50 MB of memory, or a few rows of a matrix whose groups
    span several rows.
    """
    layouts = Layouts(checkpoint, input_dims)
    scanner = Scanner(on_bytes)
    for entry in checkpoint.tensors:
        facts = TensorFacts(entry)
        if entry.dtype in PLAIN_FLOATS:
            _inspect(facts, scanner, _layout(layouts, entry), patterns)
        else:
            facts.num_zero = None
            on_bytes(entry.nbytes)
        yield facts


def _layout(layouts: Layouts, entry: TensorEntry) -> Layout | None:
    try:
        return layouts.of(entry)
    except UnknownLayout:
        if layouts.is_given(entry):
            raise
        return None


def _inspect(
    facts: TensorFacts,
    scanner: Scanner,
    layout: Layout | None,
    patterns: Iterable[tuple[int, int]],
) -> None:
    entry, form = facts.entry, PLAIN_FLOATS[facts.entry.dtype]
    fitting: list[tuple[int, int]] = []
    stride = 1
    if layout is not None and entry.numel:
        fitting = [(n, m) for n, m in patterns if layout.inputs % m == 0]
        stride = layout.stride
    for n, m in fitting:
        facts.num_groups[n, m], facts.num_kept[n, m] = entry.numel // m, 0
    # Chunks hold complete groups: the lengths of groups divide the inputs, as does their lcm.
    group = stride * int(np.lcm.reduce([1, *(m for _, m in fitting)])) if fitting else 1
    for chunk in scanner.chunks(entry, form.num_bytes * max(group, 1)):
        magnitudes = form.magnitudes(chunk)
        facts.num_zero = (facts.num_zero or 0) + int(np.count_nonzero(magnitudes == 0))
        facts.num_inf += int(np.count_nonzero(magnitudes == form.bits(form.inf)))
        facts.num_nan += int(np.count_nonzero(magnitudes > form.bits(form.inf)))
        for n, m in fitting:
            num_nonzero = (magnitudes != 0).reshape(-1, m, stride).sum(1, dtype=np.int32)
            facts.num_kept[n, m] += int(np.count_nonzero(num_nonzero <= n))


@dataclass(frozen=True)
class TensorDifference:
    """Two tensors of one name, element by element.

    Attributes:
        name: the name of both.
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
    one, two = Scanner(on_bytes), Scanner(on_bytes)
    for name, entry in ours.items():
        other = theirs.get(name)
        if other is None:
            yield TensorDifference(name, problem="only in the first")
        elif (entry.dtype, entry.shape) != (other.dtype, other.shape):
            described = (f"{each.dtype} {list(each.shape)}" for each in (entry, other))
            yield TensorDifference(name, problem="; ".join(described))
        else:
            yield _compare(one, two, entry, other)
    for name in theirs:
        if name not in ours:
            yield TensorDifference(name, problem="only in the second")


def _compare(
    one: Scanner, two: Scanner, entry: TensorEntry, other: TensorEntry
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


_CHUNK = 4 << 20  # bytes


class Scanner:
    """Reads tensors.

    Args:
        on_bytes: called with numbers of bytes that were read.
    """

    def __init__(self, on_bytes: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._on_bytes = on_bytes
        self._buffer = np.empty(_CHUNK, np.uint8)

    def chunks(self, entry: TensorEntry, multiple: int = 16) -> Iterator[np.ndarray]:
        """The bytes of a tensor, in order: uint8, each chunk valid until the next one.

        Args:
            entry: of the tensor.
            multiple: chunks, except the last, have a multiple of so many bytes; the buffer grows
                if it is smaller than one multiple.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        step = max(_CHUNK // multiple, 1) * multiple
        for start in range(entry.start, entry.stop, step):
            stop = min(start + step, entry.stop)
            if stop - start > len(self._buffer):
                self._buffer = np.empty(stop - start, np.uint8)
            chunk = self._buffer[: stop - start]
            read_into(entry.path, start, chunk.data)
            self._on_bytes(stop - start)
            yield chunk
