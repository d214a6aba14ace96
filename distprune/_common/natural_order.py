"""The order of names in which "layers.2" comes before "layers.10"."""

from __future__ import annotations

import functools
import re

SortKey = list[tuple[int, int, str]]


def natural_key(name: str) -> SortKey:
    """A key to sort names by: numbers in them compare as numbers."""
    return [_part_key(part) for part in _PARTS.findall(name)]


@functools.lru_cache(maxsize=1 << 16)
def _part_key(part: str) -> tuple[int, int, str]:
    """The key of a run of digits or of other characters; names consist of few different runs."""
    if not "0" <= part[0] <= "9":
        return (1, 0, part)
    number = part.lstrip("0")
    return (0, len(number), number)  # a longer number without leading zeros is a larger one


_PARTS = re.compile(r"[0-9]+|[^0-9]+")
