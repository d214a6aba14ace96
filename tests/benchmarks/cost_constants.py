"""The constants of the cost model, and how they are fitted to measured calls."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from cost_points import DTYPES, Measured, Point


@dataclass(frozen=True)
class Model:
    """Constants; times are seconds.

    Attributes:
        per_element: by dtype, of one rank that has a core for itself.
        hop: from a rank to the next one; an all-reduce around a ring of R makes 2 (R - 1) of them.
        collectives: all-reduces of a call, most of all points.
        message: bytes per rank of a call: (fixed, per parameter, per all-reduce).
    """

    fixed: float
    per_parameter: float
    per_element: dict[str, float]
    hop: float
    link: float
    bandwidth: float
    collectives: int
    message: tuple[float, float, float]

    def of_host(self, num_parameters: int) -> float:
        return self.fixed + self.per_parameter * num_parameters

    def of_communication(self, num_ranks: int, num_collectives: int, num_bytes: float) -> float:
        if num_ranks == 1:
            return 0.0
        return num_collectives * hops(num_ranks) * self.hop + num_bytes / self.link

    def of_point(self, point: Point) -> float:
        """Seconds of a call that was measured, with the collectives that it had."""
        num_local = point.num_elements / point.num_ranks
        working = self.of_host(point.num_parameters) + self.per_element[point.dtype] * num_local
        return point.num_turns * working + self.of_communication(
            point.num_ranks, point.num_collectives, point.num_bytes
        )

    def of_call(self, num_ranks: int, num_local: float, num_parameters: int, dtype: str) -> float:
        """Seconds of a call on ranks that have a core each."""
        working = self.of_host(num_parameters) + self.per_element[dtype] * num_local
        num_bytes = self.num_bytes(num_parameters)
        return working + self.of_communication(num_ranks, self.collectives, num_bytes)

    def num_bytes(self, num_parameters: int) -> float:
        """Sent by every rank in one call."""
        fixed, per_parameter, per_collective = self.message
        return fixed + per_parameter * num_parameters + per_collective * self.collectives


def hops(num_ranks: int) -> int:
    """Of one all-reduce in gloo, which goes around a ring twice."""
    return 2 * (num_ranks - 1)


def fit(measured: Measured) -> Model:
    """Least squares of relative errors, with constants that are not negative."""
    points = measured.points
    sending = [p for p in points if p.num_ranks > 1]
    message, *_ = np.linalg.lstsq(
        np.array([[1.0, p.num_parameters, p.num_collectives] for p in sending]),
        np.array([float(p.num_bytes) for p in sending]),
        rcond=None,
    )
    rows, targets = [], []
    for p in points:
        latency = 0 if p.num_ranks == 1 else p.num_collectives * hops(p.num_ranks)
        on_link = 0 if p.num_ranks == 1 else p.num_bytes / measured.link
        local = p.num_elements / p.num_ranks * p.num_turns
        by_dtype = [local if p.dtype == dtype else 0 for dtype in DTYPES]
        row = [p.num_turns, p.num_parameters * p.num_turns, *by_dtype, latency]
        rows.append(np.array(row) / p.seconds)
        targets.append((p.seconds - on_link) / p.seconds)
    found = non_negative_least_squares(np.array(rows), np.array(targets))
    return Model(
        fixed=found[0],
        per_parameter=found[1],
        per_element=dict(zip(DTYPES, found[2:4], strict=True)),
        hop=found[4],
        link=measured.link,
        bandwidth=measured.bandwidth,
        collectives=max(p.num_collectives for p in points),
        message=tuple(message.tolist()),
    )


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """By trying every set of unknowns that are not zero: for a handful of unknowns."""
    num_unknowns = matrix.shape[1]
    # Columns differ by ten orders of magnitude.
    scale = np.abs(matrix).max(axis=0)
    best, best_error = np.zeros(num_unknowns), float(target @ target)
    for size in range(1, num_unknowns + 1):
        for chosen in map(list, itertools.combinations(range(num_unknowns), size)):
            part = matrix[:, chosen] / scale[chosen]
            solution, *_ = np.linalg.lstsq(part, target, rcond=None)
            error = float(((part @ solution - target) ** 2).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_unknowns), error
                best[chosen] = solution / scale[chosen]
    return best.tolist()
