"""Parameters that a ranking has emptied, though it kept much of the others.

[Note: collapse] A parameter has collapsed if at most 1 % of its elements are left, and at least
10 % of those of all parameters that were ranked together: so it keeps at most a tenth of what all
keep. On a pretrained language model, a raw global ranking by Wanda scores pruned one matrix to 99 %
where 30 % were asked for, and the perplexity rose fourfold; with scores divided by their rms no
matrix went above 52 %. If more than 90 % are pruned as a whole, nearly empty layers are expected.
"""

from __future__ import annotations

from collections.abc import Sequence


def collapsed(counts: Sequence[tuple[int, int]]) -> list[int]:
    """The positions of parameters that have collapsed: see [Note: collapse].

    Args:
        counts: of all parameters that were ranked together: elements, and how many are pruned.
    """
    num_elements = sum(elements for elements, _ in counts)
    if 10 * sum(pruned for _, pruned in counts) > 9 * num_elements:
        return []
    return [i for i, (elements, pruned) in enumerate(counts) if is_nearly_empty(elements, pruned)]


def is_nearly_empty(num_elements: int, num_pruned: int) -> bool:
    """Whether at most 1 % of a parameter's elements are left; not if it has none."""
    return num_elements > 0 and 100 * num_pruned >= 99 * num_elements
