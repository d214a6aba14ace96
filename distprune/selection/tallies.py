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
from distprune._common.collectives import Reducer
from distprune._common.memory import Array, Scratch
from distprune.selection.candidates import Candidates
from distprune.selection.keys import KeyRange
from distprune.selection.kth_key import KthKey, refuse_nan_in
from distprune.selection.normalizing import Scored, live_array, per_chunk
from distprune.selection.radix import Search, descent_over, narrowed
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


class TallySearch:
    """The search for the k-th key among tallied parts: reads nothing.

    Args:
        parts: whose keys all have tallies.
        names: of the parameters, for messages.
        num_live: live elements of every whole parameter.
        keys: the range of the keys.
        refuse_nan: raise on a live NaN; otherwise NaN rank last.
    """

    # What a search that reads knows besides: see kth_key.KthKeySearch.
    drafted = None
    density = None

    def __init__(
        self,
        parts: Sequence[Candidates],
        names: Sequence[str],
        num_live: Sequence[int],
        keys: KeyRange,
        refuse_nan: bool,
    ) -> None:
        self._parts = parts
        self._names = names
        self._num_live = num_live
        self._keys = keys
        self._refuse_nan = refuse_nan

    def find(self, k: int) -> Search[KthKey]:
        """The k-th key (1-based)."""
        keys = self._keys
        if self._refuse_nan and keys.is_float:
            what = len(self._parts), partial(self._count_upto, keys.largest_number)
            num_nan = torch.tensor(self._num_live) - (yield what)
            refuse_nan_in(self._names, self._num_live, num_nan.tolist())
        nothing = [0] * len(self._parts)
        if not sum(self._num_live):
            return KthKey(keys.low, 0, 0, lambda: (nothing, nothing), None)
        descent, num_ties = descent_over(keys.low, keys.high, k - 1), sum(self._num_live)
        while not descent.is_done:
            step = partial(self._histogram, descent.low, descent.high, descent.shift)
            descent, num_ties = narrowed(descent, (yield descent.num_bins, step))
        threshold = descent.low

        def count() -> tuple[list[int], list[int]]:
            under = self._count_upto(threshold - 1)
            ties = self._count_upto(threshold) - under
            return under.tolist(), ties.tolist()

        return KthKey(threshold, k - 1 - descent.rank, num_ties, count, None)

    def _count_upto(self, key: int) -> Tensor:
        """Per part, this rank's elements with a key up to this one."""
        counts = [
            int(of_part[keys <= key].sum(dtype=np.int64))
            for keys, of_part in map(keys_of_tally, self._parts)
        ]
        return torch.tensor(counts, dtype=torch.int64)

    def _histogram(self, low: int, high: int, shift: int) -> Tensor:
        first = low >> shift
        histogram = np.zeros((high >> shift) - first + 1, dtype=np.int64)
        for keys, counts in map(keys_of_tally, self._parts):
            inside = (keys >= low) & (keys <= high)
            bins = (keys[inside] >> shift).astype(np.int64) - first
            # Exact: the counts of a rank are below 2**53.
            weights = counts[inside]
            histogram += np.bincount(bins, weights, len(histogram)).astype(np.int64)
        return torch.from_numpy(histogram)


def are_tallied(parts: Sequence[Candidates]) -> bool:
    """Whether all parts have tallies; so on all ranks, or on none."""
    return all(part.keys.tally is not None for part in parts)


def keys_of_tally(part: Candidates) -> tuple[Array, Array]:
    """The different keys of a tallied part, and how often each occurs."""
    tally = part.keys.tally
    assert tally is not None
    return tally.scores.numpy(), tally.counts
