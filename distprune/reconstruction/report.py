"""What a reconstruction did: the same on every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from distprune._common.report_text import CallReport, table


@dataclass(frozen=True)
class ReconstructedParameter:
    """One parameter, whole.

    Attributes:
        name: fully qualified if the parameter came from ``select``.
        num_elements, num_pruned: of the whole parameter.
        error_before: |(w0 - w) X|^2 / |w0 X|^2, where w was masked and not changed yet ...
        error_after: ... and with the new w. 0 if w0 X is zero.
        damping: what was added to the diagonal of the Gram matrix; of several matrices, to that
            with the largest.
    """

    name: str
    num_elements: int
    num_pruned: int
    error_before: float
    error_after: float
    damping: float


@dataclass(frozen=True)
class ReconstructionReport(CallReport):
    """What ``reconstruct`` did. ``print`` it on one rank; it is the same on all.

    Attributes:
        parameters: an entry for each parameter, in the caller's order.
        steps: of conjugate gradients.
        damping: as it was asked for: in units of the mean of each diagonal.
        num_ranks: the ranks that took part.
        num_collectives: collectives that this rank took part in.
        bytes_sent: the payload of these, per rank.
        seconds: wall time on this rank.
    """

    parameters: tuple[ReconstructedParameter, ...]
    steps: int
    damping: float
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            [
                entry.name,
                f"{entry.num_pruned / max(1, entry.num_elements):.2%}",
                f"{entry.error_before:.4g}",
                f"{entry.error_after:.4g}",
            ]
            for entry in self.parameters
        ]
        before, after = (
            sum(getattr(entry, name) for entry in self.parameters) / max(1, len(self.parameters))
            for name in ("error_before", "error_after")
        )
        lines = table(
            ["parameter", "pruned", "error before", "error after"],
            rows,
            ["mean", "", f"{before:.4g}", f"{after:.4g}"],
        )
        facts = [f"least squares, {self.steps} steps, damping {self.damping:g}", *self._cost()]
        return "\n".join([*lines, "; ".join(facts)])
