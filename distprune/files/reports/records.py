"""What units of work record for a report: counts by position of a tensor, as journals hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Record = Mapping[str, Any]


def summed(records: Iterable[Record], what: str) -> Counter[int]:
    """One kind of count, summed over units, by position; JSON made the positions into strings."""
    sums: Counter[int] = Counter()
    for record in records:
        sums.update({int(position): count for position, count in record.get(what, {}).items()})
    return sums
