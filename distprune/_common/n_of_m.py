"""The text of a pattern N:M; no numpy, which the help of the command line does without."""

from __future__ import annotations

import re
from typing import Any


def n_of_m(value: Any) -> tuple[int, int]:
    """ "2:4" as (2, 4).

    Raises:
        ValueError: with what was expected.
    """
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", value) if isinstance(value, str) else None
    n, m = map(int, match.groups()) if match else (0, 0)
    if not 0 < n < m:
        # Without quotes, YAML may read it as a number to the base of 60.
        raise ValueError('how many of how many are kept, such as "2:4", in quotes')
    return n, m
