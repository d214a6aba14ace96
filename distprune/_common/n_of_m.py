"""The texts of patterns, N:M and tiles; no numpy: the help of the command line does without."""

from __future__ import annotations

import re
from typing import Any

_EXPECTED = (
    # Without quotes, YAML may read it as a number to the base of 60.
    'how many of how many are kept, such as "2:4", in quotes'
)


def n_of_m(value: Any) -> tuple[int, int]:
    """ "2:4" as (2, 4).

    Raises:
        ValueError: with what was expected.
    """
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", value) if isinstance(value, str) else None
    n, m = map(int, match.groups()) if match else (0, 0)
    if not 0 < n < m:
        raise ValueError(_EXPECTED)
    return n, m


def tile_of(value: Any) -> tuple[int, int] | None:
    """ "4x8", tiles of 4 outputs and 8 inputs, as (4, 8); None for any other value."""
    match = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,4})", value) if isinstance(value, str) else None
    outputs, inputs = map(int, match.groups()) if match else (0, 0)
    return (outputs, inputs) if outputs * inputs > 1 else None


def checked_pattern(value: Any) -> str:
    """The text of a pattern, N:M or tiles, without leading zeros.

    Raises:
        ValueError: with what was expected.
    """
    tile = tile_of(value)
    if tile is not None:
        return "{}x{}".format(*tile)
    try:
        return "{}:{}".format(*n_of_m(value))
    except ValueError as error:
        raise ValueError(f'{error}, or tiles of outputs and inputs, such as "4x4"') from None
