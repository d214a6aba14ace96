"""The threshold of a group that is ranked on its own, and too large to hold."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from distprune.files.ranking.histograms import descent_to, key_histogram, narrowed
from distprune.files.ranking.lowest import Quota, Threshold
from distprune.files.ranking.streaming import Source


def find_threshold(
    source: Source, position: int, first: int, last: int, num_pruned: int
) -> Generator[None, None, Threshold]:
    """Where the items [first, last) of a tensor are cut; yields after every few megabytes.

    Args:
        source: of the plan.
        position: of the tensor.
        first, last: items of one group.
        num_pruned: how many of them go.

    Raises:
        CheckpointError: the file cannot be read, or changes while it is read.

    Cost: one read for every 16 bits of the keys; none if nothing goes.
    """
    descent = descent_to(source.format_of(position).width, num_pruned)
    num_ties = 0
    while num_pruned and not descent.is_done:
        histogram = np.zeros(descent.num_bins, dtype=np.int64)
        for keys, _ in source.chunks_of_keys(position, first, last):
            histogram += key_histogram(keys, descent)
            yield None
        descent, _ = narrowed(descent, histogram)
        num_ties = descent.rank + 1
    return Threshold(descent.low, Quota(num_ties))
