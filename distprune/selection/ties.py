"""The cut among elements of one parameter that have equal keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from distprune._common.memory import concatenate
from distprune.selection.candidates import Candidates
from distprune.selection.passes import indices_at
from distprune.selection.radix import Search, descent_over, histogram_of, narrowed, within

# So many indices of ties are kept; of more, those in range are found by another read.
_KEPT = 1 << 16


def cut_ties(
    part: Candidates, key: int, wanted: int, collected: Callable[[], Tensor | None]
) -> Search[int]:
    """The global index below which exactly ``wanted`` elements of a parameter have a key.

    Radix selection over the index, of the ties alone: of those ``collected``, if they are at hand;
    otherwise one read of this parameter, or two when there are more ties than are kept.
    """
    descent = descent_over(0, part.numel - 1, wanted - 1)
    held: Tensor | None = None
    is_first = True

    def bin_ties() -> Tensor:
        nonlocal held, is_first
        if is_first:
            held, is_first = collected(), False
        if held is not None:
            held = within(held, descent.low, descent.high)
            return histogram_of(held, descent)
        histogram = torch.zeros(descent.num_bins, dtype=torch.int64)
        kept, num_found = [], 0
        for found in indices_at(part, key, descent.low, descent.high + 1):
            histogram += histogram_of(found, descent)
            num_found += found.numel()
            # Many ties are found again in the next round, when most are out of range.
            if num_found <= _KEPT:
                kept.append(found)
        if num_found <= _KEPT:
            held = concatenate(kept)
        return histogram

    while not descent.is_done:
        descent, _ = narrowed(descent, (yield descent.num_bins, bin_ties))
    return descent.low + 1
