"""The weights of tensors that are normalised, read as seldom as possible.

Normalised scores need several passes: their statistics have to be known before they are ranked.
Weights of 16 bits have at most 2**15 different magnitudes, so a span of them is read once and is a
*tally* from then on: its different magnitudes, and how often each occurs. Tallies take some
kilobytes each; if they take more than a limit, the rest is read again in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from distprune.files.ranking.histograms import digit_histogram
from distprune.files.ranking.keys import Array
from distprune.files.ranking.streaming import Source
from distprune.files.ranking.units import Span

MAX_BYTES = 48 << 20  # of the tallies of a process


@dataclass(frozen=True)
class Weights:
    """Some weights of a span.

    Attributes:
        bits: as they are stored; of a tally, without signs.
        counts: how often each occurs; None: once.
    """

    bits: Array
    counts: Array | None = None


class Tallies:
    """Reads spans, and remembers those that it can.

    Where scores are no magnitudes, they take the place of the weights.

    Args:
        source: of the plan.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._tallies: dict[Span, Weights] = {}
        self._num_bytes = 0
        self._seen: set[Span] = set()

    def read(self, span: Span) -> Iterator[tuple[Weights | None, int]]:
        """The weights of a span in any number of pieces, each with bytes for the progress.

        The pieces are in order. One is None where weights were read that a later one has. Weights
        of 16 bits count as read once, whether they have to be read again or not.

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        if span in self._tallies:
            yield self._tallies[span], 0
            return
        itemsize = self.source.itemsize(span.position)
        is_tallied = self.source.raw_itemsize(span.position) == 2
        histogram = np.zeros(1 << 15, dtype=np.int64)
        for bits in self.source.chunks_of_raw_bits(span.position, span.first, span.last):
            num_bytes = len(bits) * itemsize
            if not is_tallied:
                yield Weights(bits), num_bytes
                continue
            histogram += digit_histogram(bits & bits.dtype.type(0x7FFF), 0, 0)
            yield None, 0 if span in self._seen else num_bytes
        self._seen.add(span)
        if is_tallied:
            tally = _tally(histogram)
            self._remember(span, tally)
            yield tally, 0

    def _remember(self, span: Span, tally: Weights) -> None:
        assert tally.counts is not None
        num_bytes = tally.bits.nbytes + tally.counts.nbytes
        if self._num_bytes + num_bytes <= MAX_BYTES:
            self._tallies[span] = tally
            self._num_bytes += num_bytes


def _tally(histogram: Array) -> Weights:
    bits = np.flatnonzero(histogram)
    counts = histogram[bits]
    return Weights(
        bits.astype(np.uint16), counts.astype(np.min_scalar_type(int(counts.max(initial=0))))
    )
