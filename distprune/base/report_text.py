"""Lists of names for messages; totals, tables and footers that reports share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class CallReport:
    """Totals over the ``parameters`` of a report, and what its call cost.

    Each of the parameters has ``num_elements`` and ``num_pruned``.
    """

    parameters: Sequence[Any]
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float

    @property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(entry.num_elements for entry in self.parameters)

    @property
    def num_pruned(self) -> int:
        """Pruned elements of all parameters."""
        return sum(entry.num_pruned for entry in self.parameters)

    @property
    def sparsity(self) -> float:
        """Share of pruned elements over all parameters, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)

    def _cost(self) -> list[str]:
        """Ranks, traffic and time of the call, for the last line of the report."""
        return [
            f"{self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}",
            f"{self.num_collectives} collectives, {self.bytes_sent:,} bytes per rank",
            f"{self.seconds:.3g} s",
        ]


def listed(names: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """The first of some names, and how many more there are, for messages."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def share(num_pruned: int, num_elements: int) -> float:
    """The sparsity, in [0, 1]; 0 if there are no elements."""
    return num_pruned / num_elements if num_elements else 0.0


def table(
    heading: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str],
    *,
    left_columns: Sequence[int] = (0,),
) -> list[str]:
    """The lines of a table: heading, rule, rows, rule, total.

    Args:
        heading, rows, total: cells, as many in each.
        left_columns: columns that are aligned on the left; all others are on the right.
    """
    widths = [max(map(len, column)) for column in zip(heading, *rows, total, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column in left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [line(heading), rule, *map(line, rows), rule, line(total)]
