"""The numbers of a checkpoint's tensors: zeros, N:M patterns; compared with another's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from distprune.base.blocks import Layout
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.files.checkpoint import Checkpoint, TensorEntry
from distprune.files.disk import read_into, slabs
from distprune.files.selecting import Layouts, UnknownLayout


@dataclass
class TensorFacts:
    """Counts of the numbers of one tensor.

    Attributes:
        entry: the tensor.
        num_zero: +0 and -0; None for other dtypes than floats of 16 bits and more.
        num_nan, num_inf: NaN and infinities.
        num_groups: by pattern (n, m), the groups of m neighbours along the input dimension. A
            pattern is missing if m does not divide the inputs or their dimension is not known.
        num_kept: by pattern, the groups with at most n nonzero numbers.
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

    Cost: one read of these tensors; the memory of a slab, or of a few rows of a matrix whose groups
    span several rows.
    """
    layouts = Layouts(checkpoint, input_dims)
    for entry in checkpoint.tensors:
        facts = TensorFacts(entry)
        form = PLAIN_FLOATS.get(entry.dtype)
        if form is None:
            facts.num_zero = None
            on_bytes(entry.nbytes)
            yield facts
            continue
        try:
            layout = layouts.of(entry)
        except UnknownLayout:
            if layouts.is_given(entry):
                raise
            layout = Layout(1, 1)
        fitting = [(n, m) for n, m in patterns if entry.numel and layout.inputs % m == 0]
        for n, m in fitting:
            facts.num_groups[n, m], facts.num_kept[n, m] = entry.numel // m, 0
        # Slabs hold whole groups: the lengths of groups divide the inputs, as does their lcm.
        block = layout.stride * math.lcm(*(m for _, m in fitting)) if fitting else 1
        num_zero = 0
        for raw in _slabs(entry, form.num_bytes, block, on_bytes):
            magnitudes = form.magnitudes(raw)
            num_zero += int(np.count_nonzero(magnitudes == 0))
            facts.num_inf += int(np.count_nonzero(magnitudes == form.bits(form.inf)))
            facts.num_nan += int(np.count_nonzero(magnitudes > form.bits(form.inf)))
            for n, m in fitting:
                groups = (magnitudes != 0).reshape(-1, m, layout.stride)
                num_kept = np.count_nonzero(groups.sum(1, dtype=np.int32) <= n)
                facts.num_kept[n, m] += int(num_kept)
        facts.num_zero = num_zero
        yield facts


def _slabs(
    entry: TensorEntry, itemsize: int, block: int, on_bytes: Callable[[int], None]
) -> Iterator[np.ndarray]:
    """The bytes of a tensor, slab by slab, as ``slabs`` divides it: uint8."""
    for run in slabs(entry.nbytes // itemsize, itemsize, block):
        raw = np.empty(len(run) * itemsize, np.uint8)
        read_into(entry.path, entry.start + run.start * itemsize, raw.data)
        on_bytes(len(raw))
        yield raw


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

    Cost: one read of each; the memory of a slab.
    """
    ours = {entry.name: entry for entry in first.tensors}
    theirs = {entry.name: entry for entry in second.tensors}
    for name, entry in ours.items():
        other = theirs.get(name)
        if other is None:
            yield TensorDifference(name, problem="only in the first")
        elif (entry.dtype, entry.shape) != (other.dtype, other.shape):
            described = (f"{each.dtype} {list(each.shape)}" for each in (entry, other))
            yield TensorDifference(name, problem="; ".join(described))
        else:
            yield _compare(entry, other, on_bytes)
    for name in theirs:
        if name not in ours:
            yield TensorDifference(name, problem="only in the second")


def _compare(
    first: TensorEntry, second: TensorEntry, on_bytes: Callable[[int], None]
) -> TensorDifference:
    form = PLAIN_FLOATS.get(first.dtype)
    itemsize = first.nbytes // first.numel if first.numel else 1
    if itemsize * first.numel != first.nbytes:  # numbers of less than a byte
        itemsize = 1
    counts = np.zeros(4, dtype=np.int64)
    both = (_slabs(entry, itemsize, 1, on_bytes) for entry in (first, second))
    for ours, theirs in zip(*both, strict=True):
        differs = (ours != theirs).reshape(-1, itemsize).any(1)
        counts[0] += np.count_nonzero(differs)
        if form is not None:
            one, two = form.magnitudes(ours) == 0, form.magnitudes(theirs) == 0
            counts[1:] += [np.count_nonzero(z) for z in (one & two, one & ~two, two & ~one)]
    return TensorDifference(first.name, first.numel, *counts.tolist())


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
