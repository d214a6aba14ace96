"""How sparse the tensors of a checkpoint are, and in which form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from distprune._common.float_formats import PLAIN_FLOATS, FloatFormat
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.scanning import Scanner
from distprune.files.checkpoints.special_values import count_special, is_countable
from distprune.files.formats.header import TensorEntry
from distprune.files.selecting.layouts import Layout, Layouts, UnknownLayout


@dataclass
class TensorFacts:
    """What the numbers of one tensor are.

    Attributes:
        entry: the tensor.
        num_zero: +0 and -0; None of a dtype whose numbers are not known here (6 bits, or an
            unknown one).
        num_nan, num_inf: as they say.
        num_groups: of every pattern (n, m), how many groups of m neighbours along the input
            dimension there are; without an entry where m does not divide the inputs, or where
            they lie along a dimension that is not known.
        num_kept: ... and how many of these have at most n numbers that are not zero.
        exponents: how many numbers lie in [2**e, 2**(e+1)), by e; subnormals are one
            below the smallest. Of plain floats of 16 bits and more only, as are the groups.
    """

    entry: TensorEntry
    num_zero: int | None = 0
    num_nan: int = 0
    num_inf: int = 0
    num_groups: dict[tuple[int, int], int] = field(default_factory=dict)
    num_kept: dict[tuple[int, int], int] = field(default_factory=dict)
    exponents: Counter[int] = field(default_factory=Counter)


def inspect(
    checkpoint: Checkpoint,
    patterns: Sequence[tuple[int, int]] = ((2, 4),),
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    only: Container[str] | None = None,
    input_dims: Iterable[tuple[str, Sequence[int]]] = (),
) -> Iterator[TensorFacts]:
    """Look at every tensor, one after the other.

    Args:
        checkpoint: from ``open_checkpoint``.
        patterns: N:M patterns to look for.
        on_bytes: is told how many bytes have been read.
        only: names of tensors to look at; by default all.
        input_dims: as in a recipe, for tensors whose inputs nothing else tells.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.
        SelectionError: ``input_dims`` do not fit.

    Cost: one read of these tensors; some 50 MB of memory, or a few rows of groups that lie across
    the rows of a matrix.
    """
    layouts = Layouts(checkpoint, input_dims)
    with closing(Scanner(checkpoint)) as scanner:
        for entry in checkpoint.tensors:
            if only is not None and entry.name not in only:
                continue
            if entry.dtype in PLAIN_FLOATS:
                yield _inspect(scanner, entry, _layout(layouts, entry), patterns, on_bytes)
            else:
                yield _inspect_others(scanner, entry, on_bytes)


def _layout(layouts: Layouts, entry: TensorEntry) -> Layout | None:
    try:
        return layouts.of(entry)
    except UnknownLayout:
        if layouts.is_given(entry):
            raise
        return None


def sample_exponents(
    checkpoint: Checkpoint,
    names: Container[str],
    max_bytes: int,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[Counter[int], float]:
    """How large the numbers of some tensors are, from an even sample where there are many.

    Args:
        checkpoint: from ``open_checkpoint``.
        names: of tensors; those that are no plain floats are passed over.
        max_bytes: roughly how much is read at most.
        on_bytes: is told how many bytes have been read.

    Returns:
        Counts as in :attr:`TensorFacts.exponents`, and the share of the bytes that was read: 1.0
        if the counts are those of all elements.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.
    """
    entries = [e for e in checkpoint.tensors if e.name in names and e.dtype in PLAIN_FLOATS]
    exponents: Counter[int] = Counter()
    num_read, num_bytes = 0, sum(entry.nbytes for entry in entries)
    with closing(Scanner(checkpoint)) as scanner:
        for entry, chunk in scanner.sample(entries, max_bytes):
            form, facts = PLAIN_FLOATS[entry.dtype], TensorFacts(entry)
            _count(facts, form, form.magnitudes(chunk))
            exponents.update(facts.exponents)
            num_read += chunk.nbytes
            on_bytes(chunk.nbytes)
    return exponents, num_read / num_bytes if num_bytes else 1.0


def _inspect(
    scanner: Scanner,
    entry: TensorEntry,
    layout: Layout | None,
    patterns: Iterable[tuple[int, int]],
    on_bytes: Callable[[int], None],
) -> TensorFacts:
    form, facts = PLAIN_FLOATS[entry.dtype], TensorFacts(entry)
    fitting: list[tuple[int, int]] = []
    stride = 1
    if layout is not None and entry.numel:
        fitting = [(n, m) for n, m in patterns if layout.inputs % m == 0]
        stride = layout.stride
    for n, m in fitting:
        facts.num_groups[n, m], facts.num_kept[n, m] = entry.numel // m, 0
    # A chunk is whole groups: the lengths of groups divide the inputs, and so does their multiple.
    whole = stride * int(np.lcm.reduce([1, *(m for _, m in fitting)])) if fitting else 1
    for chunk in scanner.chunks(entry, form.num_bytes * max(whole, 1)):
        magnitudes = form.magnitudes(chunk)
        _count(facts, form, magnitudes)
        for n, m in fitting:
            lives = (magnitudes != 0).reshape(-1, m, stride)
            facts.num_kept[n, m] += int(np.count_nonzero(lives.sum(1, dtype=np.int32) <= n))
        on_bytes(chunk.nbytes)
    return facts


def _inspect_others(
    scanner: Scanner, entry: TensorEntry, on_bytes: Callable[[int], None]
) -> TensorFacts:
    """Zeros of what is no plain float."""
    if not is_countable(entry.dtype):
        on_bytes(entry.nbytes)
        return TensorFacts(entry, num_zero=None)
    found = []
    for chunk in scanner.chunks(entry):
        found.append(count_special(entry.dtype, chunk))
        on_bytes(chunk.nbytes)
    return TensorFacts(
        entry,
        num_zero=sum(each.num_zero for each in found),
        num_nan=sum(each.num_nan for each in found),
        num_inf=sum(each.num_inf for each in found),
    )


def _count(facts: TensorFacts, form: FloatFormat, magnitudes: np.ndarray) -> None:
    last = (1 << form.num_exponent_bits) - 1
    biased = (magnitudes >> form.bits(form.num_fraction_bits)).astype(np.int64)
    counts = np.bincount(biased, minlength=last + 1)
    num_zero = magnitudes.size - int(np.count_nonzero(magnitudes))
    num_inf = int(np.count_nonzero(magnitudes == form.bits(form.inf)))
    facts.num_zero = (facts.num_zero or 0) + num_zero
    facts.num_inf += num_inf
    facts.num_nan += int(counts[last]) - num_inf
    counts[0] -= num_zero
    for exponent in np.flatnonzero(counts[:last]).tolist():
        # A biased exponent of 0 is that of subnormals: below the power of two of 1.
        facts.exponents[max(exponent, 1) - form.bias - (exponent == 0)] += int(counts[exponent])
