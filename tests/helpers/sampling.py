"""How much of a matrix of cases runs: a sample by default, all of it with DISTPRUNE_THOROUGH=1.

`make test-thorough` sets the variable. Samples are fixed: two runs test the same cases. Of a test
with several arguments, as many cases run as are needed to have every value of every argument
(``covering``, which conftest.py applies); ``axes`` says what counts as a value of a wrapping. A
test that makes its own list of cases takes another sample of them on each wrapping (``on_each``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

THOROUGH = bool(os.environ.get("DISTPRUNE_THOROUGH"))

Case = TypeVar("Case")


def every(step: int, cases: Iterable[Case], start: int = 0) -> list[Case]:
    """Each ``step``-th case from number ``start % step`` on; all cases in a thorough run."""
    cases = list(cases)
    return cases if THOROUGH else cases[start % step :: step]


def on_each(wrappings: Iterable[str], step: int, cases: Sequence[Case]) -> list[tuple[str, Case]]:
    """A sample of some cases with each wrapping, another one in turn."""
    turns = enumerate(wrappings)
    return [(wrapping, case) for turn, wrapping in turns for case in every(step, cases, turn)]


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


def axes(case: Mapping[str, object], kinds: bool, sizes: bool) -> dict[str, object]:
    """A case, with what has to be covered of its wrapping in place of the wrapping.

    Args:
        kinds: each kind; otherwise the two ways to hold parameters, as tensors or as DTensors.
        sizes: each number of processes, too.
    """
    wrapping = case.get("wrapping")
    if not isinstance(wrapping, str) or "-" not in wrapping:
        return dict(case)
    kind = wrapping.partition("-")[0]
    is_dtensor = kind.startswith(("fsdp2", "hsdp", "tp"))
    size = {"size": num_processes(case)} if sizes else {}
    return {**case, "wrapping": kind if kinds else is_dtensor, **size}


def num_processes(case: Mapping[str, object]) -> int:
    """How many ranks the wrapping of a case has; 0 for a case without one."""
    _, _, mesh = str(case.get("wrapping", "")).partition("-")
    return math.prod(map(int, mesh.split("x"))) if mesh else 0


def num_examples(number: int) -> int:
    """Examples for a test of hypothesis: an eighth by default, ``number`` in a thorough run."""
    return number if THOROUGH else number // 8
