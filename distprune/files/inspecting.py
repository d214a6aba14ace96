"""How sparse the tensors of a checkpoint are, and in which form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from distprune.files.checkpoint import Checkpoint
from distprune.files.header import TensorEntry
from distprune.files.policy import input_groups
from distprune.files.scanning import FORMATS, FloatFormat, Scanner


@dataclass
class TensorFacts:
    """What the numbers of one tensor are.

    Attributes:
        entry: the tensor.
        num_zero: +0 and -0.
        num_nan, num_inf: as they say.
        num_groups: of every pattern (n, m), how many groups of m neighbours along the input
            dimension there are; without an entry where m does not divide the inputs.
        num_kept: ... and how many of these have at most n numbers that are not zero.
        exponents: how many numbers lie in [2**e, 2**(e+1)), by e; subnormals are one
            below the smallest.
    """

    entry: TensorEntry
    num_zero: int = 0
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
) -> Iterator[TensorFacts]:
    """Look at every tensor of floats, one after the other.

    Args:
        checkpoint: from ``open_checkpoint``.
        patterns: N:M patterns to look for.
        on_bytes: is told how many bytes have been read.
        only: names of tensors to look at; by default all of floats.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.

    Cost: one read of these tensors; some 50 MB of memory, or one row of a convolution.
    """
    with closing(Scanner(checkpoint)) as scanner:
        for entry in checkpoint.tensors:
            if entry.dtype in FORMATS and (only is None or entry.name in only):
                yield _inspect(scanner, entry, patterns, on_bytes)


def _inspect(
    scanner: Scanner,
    entry: TensorEntry,
    patterns: Iterable[tuple[int, int]],
    on_bytes: Callable[[int], None],
) -> TensorFacts:
    form, facts = FORMATS[entry.dtype], TensorFacts(entry)
    _, inputs, kernel = input_groups(entry)
    fitting = [(n, m) for n, m in patterns if entry.numel and inputs % m == 0]
    for n, m in fitting:
        facts.num_groups[n, m], facts.num_kept[n, m] = entry.numel // m, 0
    # A chunk is whole groups: neighbours of a matrix, whole outputs of a convolution.
    whole = inputs * kernel if kernel > 1 else int(np.lcm.reduce([1, *(m for _, m in fitting)]))
    for chunk in scanner.chunks(entry, form.width * max(whole, 1)):
        magnitudes = form.magnitudes(chunk)
        _count(facts, form, magnitudes)
        for n, m in fitting:
            lives = (magnitudes != 0).reshape(-1, m, kernel)
            facts.num_kept[n, m] += int(np.count_nonzero(lives.sum(1, dtype=np.int32) <= n))
        on_bytes(chunk.nbytes)
    return facts


def _count(facts: TensorFacts, form: FloatFormat, magnitudes: np.ndarray) -> None:
    last = (1 << form.num_exponent_bits) - 1
    biased = (magnitudes >> form.bits(form.num_fraction_bits)).astype(np.int64)
    counts = np.bincount(biased, minlength=last + 1)
    num_zero = magnitudes.size - int(np.count_nonzero(magnitudes))
    num_inf = int(np.count_nonzero(magnitudes == form.bits(last << form.num_fraction_bits)))
    facts.num_zero += num_zero
    facts.num_inf += num_inf
    facts.num_nan += int(counts[last]) - num_inf
    counts[0] -= num_zero
    for exponent in np.flatnonzero(counts[:last]).tolist():
        # A biased exponent of 0 is that of subnormals: below the power of two of 1.
        facts.exponents[max(exponent, 1) - form.bias - (exponent == 0)] += int(counts[exponent])
