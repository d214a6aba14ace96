"""The order of names in which "layers.2" comes before "layers.10"."""

from __future__ import annotations

import re

SortKey = list[tuple[int, int, str]]


def natural_key(name: str) -> SortKey:
    """A key to sort names by: numbers in them compare as numbers."""
    key: SortKey = []
    for digits, text in re.findall(r"([0-9]+)|([^0-9]+)", name):
        number = digits.lstrip("0")
        # A longer number without leading zeros is a larger one.
        key.append((1, 0, text) if text else (0, len(number), number))
    return key
