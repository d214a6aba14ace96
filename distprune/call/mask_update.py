"""What ``set_masks`` did: exact counts, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from distprune._common.report_text import Totals, cost_facts, share, table


@dataclass(frozen=True)
class MaskUpdate:
    """One parameter, whole, each element counted once.

    Attributes:
        name: fully qualified if the parameter came from ``select``.
        num_elements: of the whole parameter.
        num_pruned: pruned elements, now.
        num_grown: elements that were pruned before, and are not now ...
        num_dropped: ... and the other way round.
    """

    name: str
    num_elements: int
    num_pruned: int
    num_grown: int
    num_dropped: int

    @property
    def sparsity(self) -> float:
        """Share of pruned elements, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)


@dataclass(frozen=True)
class MaskUpdateReport(Totals):
    """What ``set_masks`` did. ``print`` it on one rank; it is the same on all.

    Attributes:
        parameters: in the caller's order.
        num_ranks: that took part.
        num_collectives: all-reduces that this rank took part in.
        bytes_sent: their payload, per rank.
        seconds: wall time on this rank.
    """

    parameters: tuple[MaskUpdate, ...]
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float

    @property
    def num_grown(self) -> int:
        """Elements of all parameters that were pruned before, and are not now."""
        return sum(entry.num_grown for entry in self.parameters)

    @property
    def num_dropped(self) -> int:
        """Elements of all parameters that are pruned now, and were not before."""
        return sum(entry.num_dropped for entry in self.parameters)

    def __str__(self) -> str:
        rows = [
            [
                entry.name,
                f"{entry.num_elements:,}",
                f"{entry.num_dropped:,}",
                f"{entry.num_grown:,}",
                f"{entry.sparsity:.2%}",
            ]
            for entry in self.parameters
        ]
        total = [
            "total",
            f"{self.num_elements:,}",
            f"{self.num_dropped:,}",
            f"{self.num_grown:,}",
            f"{self.sparsity:.2%}",
        ]
        heading = ["parameter", "elements", "dropped", "grown", "sparsity"]
        return "\n".join([*table(heading, rows, total), "; ".join(cost_facts(self))])
