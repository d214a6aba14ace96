"""The cut among elements of one parameter that have equal keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from distprune._common.memory import concatenate
from distprune._common.radix import Descent
from distprune.selection.candidates import Candidates
from distprune.selection.passes import count_in_bins, indices_at
from distprune.selection.radix import (
    Search,
    changed,
    descent_over,
    histogram_of,
    narrowed,
    within,
)
from distprune.selection.scores import Tally

# At most so many indices of ties are kept; for more, the next round scans the parameter again.
_KEPT = 1 << 16


def cut_ties(
    part: Candidates, key: int, num_pruned: int, collected: Callable[[], Tensor | None]
) -> Search[int]:
    """The global index below which exactly ``num_pruned`` elements of a parameter have a key.

    Where a tally has counts of blocks, only one block is looked at.

    Radix selection over the indices of the ties: of those that a scan has collected, if one has.
    Otherwise, where later positions of a shard have larger indices, each bin is a run of the shard,
    and its ties are counted: one scan of this parameter, and then of one bin. Elsewhere, in memory
    that is not row-major, one scan of this parameter finds the indices, or two when there are more
    ties than are kept.

    Args:
        collected: global indices of this rank's ties, or None.
    """
    descent = descent_over(0, part.numel - 1, num_pruned - 1)
    tally = part.keys.tally
    if tally is not None and tally.block < part.numel:
        descent, num_ties = yield from _block_of(tally, part.numel, key, num_pruned - 1)
        if descent.rank == num_ties - 1:
            return descent.high + 1
    ties: Tensor | None = None
    is_first = True

    def count_bins() -> Tensor:
        nonlocal ties, is_first
        if is_first:
            ties, is_first = collected(), False
        if ties is None and part.index.is_ascending:
            return count_in_bins(part, key, descent)
        if ties is not None:
            ties = within(ties, descent.low, descent.high)
            return histogram_of(ties, descent)
        histogram = torch.zeros(descent.num_bins, dtype=torch.int64)
        kept, num_ties = [], 0
        for indices in indices_at(part, key, descent.low, descent.high + 1):
            histogram += histogram_of(indices, descent)
            num_ties += indices.numel()
            if num_ties <= _KEPT:
                kept.append(indices)
        if num_ties <= _KEPT:
            ties = concatenate(kept)
        return histogram

    while not descent.is_done:
        descent, num_ties = narrowed(descent, (yield descent.num_bins, count_bins))
        if descent.rank == num_ties - 1:  # all ties of the bin are pruned, as if there are few
            return descent.high + 1
    return descent.low + 1


def _block_of(tally: Tally, numel: int, key: int, rank: int) -> Search[tuple[Descent, int]]:
    """The descent in the block that has the tie of a rank, and how many ties the block has."""
    num_blocks = -(-numel // tally.block)

    def count() -> Tensor:
        counts = torch.zeros(num_blocks, dtype=torch.int64)
        ties = tally.counts_of_blocks[:, tally.scores.numpy() == key].sum(axis=1, dtype=np.int64)
        counts[: len(ties)] = torch.from_numpy(ties)
        return counts

    counts = (yield num_blocks, count).numpy()
    num_before = np.cumsum(counts) - counts
    number = int(np.searchsorted(num_before, rank, side="right")) - 1
    if rank - num_before[number] >= counts[number]:
        raise changed()
    low = number * tally.block
    high = min(low + tally.block, numel) - 1
    return descent_over(low, high, rank - int(num_before[number])), int(counts[number])
