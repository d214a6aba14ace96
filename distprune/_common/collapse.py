"""Parameters that a ranking has emptied, though it kept much of the others."""

from __future__ import annotations

from collections.abc import Sequence

# A parameter has collapsed if it keeps less than this part of the share that all keep together.
LEAST_SHARE = 0.1


def collapsed(counts: Sequence[tuple[int, int]]) -> list[int]:
    """The positions of parameters that keep less than a tenth of the share that all keep.

    At a sparsity of 50 % these are parameters that lose more than 95 %, at 90 % those that lose
    more than 99 %. Where nothing is kept, none has collapsed.

    Args:
        counts: of parameters that were ranked together: elements, and how many are pruned.
    """
    num_elements = sum(elements for elements, _ in counts)
    num_kept = num_elements - sum(pruned for _, pruned in counts)
    return [
        position
        for position, (elements, pruned) in enumerate(counts)
        if (elements - pruned) * num_elements < LEAST_SHARE * num_kept * elements
    ]
