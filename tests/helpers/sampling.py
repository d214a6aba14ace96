"""How much of a matrix of cases runs: a sample by default, all of it with DISTPRUNE_THOROUGH=1.

`make test-thorough` sets the variable. Samples are fixed: two runs test the same cases. A test
that runs several cases on each of several wrappings takes another sample on each of them, so that
every case runs on some wrapping.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

THOROUGH = bool(os.environ.get("DISTPRUNE_THOROUGH"))

Case = TypeVar("Case")


def every(step: int, cases: Iterable[Case], start: int = 0) -> list[Case]:
    """Each ``step``-th case from number ``start % step`` on; all cases in a thorough run."""
    cases = list(cases)
    return cases if THOROUGH else cases[start % step :: step]


def num_examples(number: int) -> int:
    """Examples for a test of hypothesis: a quarter by default, ``number`` in a thorough run."""
    return number if THOROUGH else number // 4
