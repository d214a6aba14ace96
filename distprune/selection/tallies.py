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

import numpy as np
import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.collectives import Reducer
from distprune._common.memory import Array, Scratch
from distprune.selection.candidates import Candidates
from distprune.selection.normalizing import Scored, live_array, per_chunk
from distprune.selection.scores import ScoreSource, TalliedScores, Tally

_BINS = 1 << 15
_MAGNITUDE = _BINS - 1


def tallied(
    parts: Sequence[Scored], communicator: Reducer, most_bytes: int, block: int | None = None
) -> list[ScoreSource] | None:
    """The scores of all parts with their tallies; None if there are none. Collective.

    Args:
        parts: this rank's part of every parameter; ranked by |score|.
        communicator: the ranks that have the parts.
        most_bytes: that the tallies of a rank may take.
        block: elements of the blocks that are counted apart, where positions are indices of the
            whole parameter: of ties that a cut divides, one block has to be read. None: count
            parts as a whole.

    Returns:
        None on every rank if the scores of a part have more than 16 bits, or are not on a CPU, or
        if the tallies of a rank take too much memory.

    Cost: a read of the scores, if all of them can be tallied; an all-reduce of 8 bytes.
    """
    tallies: list[Tally] = []

    def make() -> Tensor:
        if all(_is_tallied(part) for part in parts):
            tallies.extend(_make_tallies(parts, most_bytes, block))
        return torch.tensor([len(tallies) < len(parts)], dtype=torch.int64)

    if int(communicator.reduce(1, make)):
        return None
    return [TalliedScores(part.scores, tally) for part, tally in zip(parts, tallies, strict=True)]


def _is_tallied(part: Scored) -> bool:
    dtype = part.scores.dtype
    return dtype.is_floating_point and dtype.itemsize == 2 and memory.takes_numpy(part.device)


def _make_tallies(parts: Sequence[Scored], most_bytes: int, block: int | None) -> list[Tally]:
    """The tallies of all parts; of the first ones, if all take too much memory."""
    tallies: list[Tally] = []
    num_bytes = 0
    for part in parts:
        size = block or max(part.counted.stop, 1)
        blocks = [
            _counts(replace(part, counted=range(max(start, part.counted.start), stop)))
            for start in range(0, part.counted.stop, size)
            if (stop := min(start + size, part.counted.stop)) > part.counted.start
        ]
        num_before = part.counted.start // size  # blocks that only other ranks count
        bits = np.flatnonzero(sum(blocks, start=np.zeros(_BINS, dtype=np.int64)))
        dtype = np.min_scalar_type(max((int(counts.max()) for counts in blocks), default=0))
        counts = np.zeros((num_before + len(blocks), len(bits)), dtype)
        for row, of_block in zip(counts[num_before:], blocks, strict=True):
            row[:] = of_block[bits]
        scores = torch.from_numpy(bits.astype(np.int16)).view(part.scores.dtype)
        num_bytes += scores.nbytes + counts.nbytes
        if num_bytes > most_bytes:
            break
        tallies.append(Tally(scores, counts, size))
    return tallies


def _counts(part: Scored) -> Array:
    """int64 [2**15]: how often each magnitude of 16 bits occurs."""
    counts = np.zeros(_BINS, dtype=np.int64)
    lock = threading.Lock()

    def add(part: Scored, span: range, scratch: Scratch) -> int:
        bits = part.scores.load(span.start, span.stop, scratch).contiguous().view(torch.int16)
        magnitudes = np.bitwise_and(
            bits.numpy(), np.int16(_MAGNITUDE), out=scratch.array("tally", bits.numel(), np.int16)
        )
        if part.live is not None:
            magnitudes = magnitudes[live_array(part.live, span, scratch)]
        of_chunk = torch.bincount(torch.from_numpy(magnitudes), minlength=_BINS).numpy()
        with lock:
            np.add(counts, of_chunk, out=counts)
        return 0

    per_chunk([part], [add])
    return counts


def are_tallied(parts: Sequence[Candidates]) -> bool:
    """Whether all parts have tallies; so on all ranks, or on none."""
    return all(part.keys.tally is not None for part in parts)


def keys_of_tally(part: Candidates) -> tuple[Array, Array]:
    """The different keys of a tallied part, and how often each occurs."""
    tally = part.keys.tally
    assert tally is not None
    return tally.scores.numpy(), tally.counts
