"""How much of a matrix of cases runs: a sample by default, all of it with DISTPRUNE_THOROUGH=1.

`make test-thorough` sets the variable. Samples are fixed: two runs test the same cases. Of a test
with several arguments, as many cases run as are needed to have every value of every argument
(``covering``, which conftest.py applies), and of wrappings one of each wrapper (``by_wrapper``). A
test that makes its own list of cases takes another sample of them on each wrapping (``every``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

THOROUGH = bool(os.environ.get("DISTPRUNE_THOROUGH"))

Case = TypeVar("Case")


def every(step: int, cases: Iterable[Case], start: int = 0) -> list[Case]:
    """Each ``step``-th case from number ``start % step`` on; all cases in a thorough run."""
    cases = list(cases)
    return cases if THOROUGH else cases[start % step :: step]


def covering(cases: Sequence[Mapping[str, object]]) -> list[int]:
    """Positions of a few cases that together have every value of every argument, ascending.

    Args:
        cases: by name of an argument, its value; values are the same if their ``repr`` is.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    missing = set().union(*values)
    chosen: list[int] = []
    while missing:
        best = max(range(len(values)), key=lambda i: (len(values[i] & missing), -i))
        missing -= values[best]
        chosen.append(best)
    return sorted(chosen)


def by_wrapper(case: Mapping[str, object]) -> dict[str, object]:
    """A case with the wrapper in place of the wrapping: FSDP1 and FSDP2 have several kinds."""
    wrapping = case.get("wrapping")
    if not isinstance(wrapping, str):
        return dict(case)
    kind = wrapping.partition("-")[0]
    is_variant = kind.startswith(("fsdp1", "fsdp2_root", "fsdp2_dim1"))
    return {**case, "wrapping": kind[:5] if is_variant else kind}


def num_examples(number: int) -> int:
    """Examples for a test of hypothesis: a quarter by default, ``number`` in a thorough run."""
    return number if THOROUGH else number // 4
