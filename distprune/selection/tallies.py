"""Tallies: scores of 16 bits are read once, and passes that only count need no other read.

A number of 16 bits has at most 2**15 different magnitudes. So one read of a part gives its *tally*:
its different magnitudes, and how often each occurs, in about six bytes each. The largest score,
sums, and every count that selection makes follow from tallies, also those of scores that are
multiplied by a number (``scores.ScaledScores``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.collectives import Communicator
from distprune._common.memory import Array, Scratch
from distprune.selection.candidates import Candidates
from distprune.selection.kernels import call_all, num_threads, spans_of
from distprune.selection.keys import ScoreKeys
from distprune.selection.normalizing import Scored, live_array
from distprune.selection.radix import Descent
from distprune.selection.scores import ScaledScores, TalliedScores, Tally

_BINS = 1 << 15
_MAGNITUDE = _BINS - 1


def tallied(
    parts: Sequence[Scored], communicator: Communicator, most_bytes: int, block: int | None = None
) -> list[Scored]:
    """The same parts, with tallies of their scores if all have them. Collective.

    Args:
        parts: this rank's part of every parameter; ranked by |score|.
        communicator: the ranks that have the parts.
        most_bytes: that the tallies of a rank may take.
        block: elements of the blocks that are counted apart, where positions are indices of the
            whole parameter: of ties that a cut divides, one block has to be read. None: count
            parts as a whole.

    Returns:
        The parts as they are, on every rank, if the scores of a part have more than 16 bits, or are
        not on a CPU, or if the tallies of a rank take too much memory.

    Cost: a read of the scores, if all of them can be tallied; an all-reduce of 8 bytes. Memory: 64
    or 128 KiB for each block of a part while the part is read.
    """
    tallies: list[Tally] = []

    def make() -> Tensor:
        num_bytes, lock = 0, threading.Lock()
        for part in parts if all(map(_is_tallied, parts)) else ():
            counted, size = part.counted, block or max(part.counted.stop, 1)
            num_before = counted.start // size  # blocks that only other ranks count
            rows = []
            for start in range(num_before * size, counted.stop, size):
                span = range(max(start, counted.start), min(start + size, counted.stop))
                counts = np.zeros(_BINS, dtype=np.int64)
                chunks = list(spans_of(span, part.device, part.dtype.itemsize))
                width = part.dtype.itemsize if part.scores.is_thread_safe else 0
                calls = [partial(_count, part, chunk, counts, lock) for chunk in chunks]
                call_all(calls, num_threads(len(span) * width, len(chunks)))
                rows.append(counts.astype(np.min_scalar_type(int(counts.max()))))
            tally = _tally_of(part, block, num_before, rows)
            num_bytes += tally.scores.nbytes + tally.counts_of_blocks.nbytes
            if num_bytes > most_bytes:
                break
            tallies.append(tally)
        return torch.tensor([len(tallies) < len(parts)], dtype=torch.int64)

    if int(communicator.reduce(1, make)):
        return list(parts)
    return [
        replace(part, scores=TalliedScores(part.scores, tally))
        for part, tally in zip(parts, tallies, strict=True)
    ]


def _is_tallied(part: Scored) -> bool:
    dtype = part.scores.dtype
    return dtype.is_floating_point and dtype.itemsize == 2 and memory.takes_numpy(part.device)


def _count(
    part: Scored, span: range, counts: Array, lock: threading.Lock, scratch: Scratch
) -> None:
    """Add to int64 [2**15] how often each magnitude of 16 bits occurs in a chunk."""
    bits = part.scores.load(span.start, span.stop, scratch).contiguous().view(torch.int16)
    magnitudes = np.bitwise_and(
        bits.numpy(), np.int16(_MAGNITUDE), out=scratch.array("tally", bits.numel(), np.int16)
    )
    if part.live is not None:
        magnitudes = magnitudes[live_array(part.live, span, scratch)]
    of_chunk = torch.bincount(torch.from_numpy(magnitudes), minlength=_BINS).numpy()
    with lock:
        np.add(counts, of_chunk, out=counts)


def _tally_of(part: Scored, block: int | None, num_before: int, rows: Sequence[Array]) -> Tally:
    """The tally of a part, from counts of all magnitudes in the blocks that this rank counts."""
    bits = np.flatnonzero(sum(rows, start=np.zeros(_BINS, dtype=np.int64)))
    dtype = np.result_type(np.uint8, *rows)
    counts_of_blocks = np.zeros((num_before + len(rows), len(bits)), dtype)
    for own, row in zip(counts_of_blocks[num_before:], rows, strict=True):
        own[:] = row[bits]
    scores = torch.from_numpy(bits.astype(np.int16)).view(part.scores.dtype)
    return Tally(scores, counts_of_blocks, block)


def count_ties(part: Candidates, key: int, bins: Descent) -> Tensor:
    """``passes.count_in_bins`` of a part whose tally has blocks: scores are compared as stored.

    Several magnitudes may have one key if they are multiplied; they are neighbours.
    """
    assert isinstance(part.keys, ScoreKeys) and part.keys.tally is not None
    source, scratch = part.keys.scores, Scratch()
    if isinstance(source, ScaledScores):
        source = source.unscaled
    assert source.tally is not None
    stored = source.tally.scores.view(torch.int16).numpy()
    with_key = stored[part.keys.tally.scores.numpy() == key]
    counts = np.zeros(bins.num_bins, dtype=np.int64)
    first = max(bins.low, part.counted.start)
    span = range(first, max(first, min(bins.high + 1, part.counted.stop)))
    for chunk in spans_of(span, part.device, source.dtype.itemsize) if len(with_key) else ():
        bits = source.load(chunk.start, chunk.stop, scratch).contiguous().view(torch.int16)
        magnitudes = np.bitwise_and(bits.numpy(), np.int16(_MAGNITUDE))
        ties = np.flatnonzero((magnitudes >= with_key[0]) & (magnitudes <= with_key[-1]))
        numbers = ((ties + chunk.start) >> bins.shift) - (bins.low >> bins.shift)
        counts += np.bincount(numbers, minlength=len(counts))
    return torch.from_numpy(counts)


def are_tallied(parts: Sequence[Candidates]) -> bool:
    """Whether all parts have tallies; so on all ranks, or on none."""
    return all(part.keys.tally is not None for part in parts)


def keys_of_tally(part: Candidates) -> tuple[Array, Array]:
    """The different keys of a tallied part, and how often each occurs."""
    tally = part.keys.tally
    assert tally is not None
    return tally.scores.numpy(), tally.counts
