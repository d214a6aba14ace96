"""Where the ranking of all selected elements is cut: found exactly, in one read of 16-bit weights.

Histograms of sixteen bits of the keys at a time are summed over all ranks; that of the last
sixteen is kept for each unit as well, so that its ties at the threshold need no other read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune.files.errors import SelectionError
from distprune.files.planning import Plan
from distprune.files.scores import Array, Descent
from distprune.files.streaming import Source
from distprune.files.team import Team
from distprune.files.units import PruneUnit


@dataclass(frozen=True)
class Decision:
    """The cut of the total order, the same on every rank.

    Attributes:
        threshold: elements with a smaller key go.
        num_ties: elements with this key.
        quotas: per unit, how many of them go, the first ones.
        num_nan: by name of a tensor that holds some.
    """

    threshold: int
    num_ties: int
    quotas: list[int]
    num_nan: dict[str, int]


def decide(
    team: Team, plan: Plan, source: Source, units: Sequence[PruneUnit], mine: Sequence[int]
) -> Decision:
    """Find the cut after ``plan.num_to_prune`` elements.

    Args:
        team: the ranks.
        plan: of scope "global", without a pattern.
        source: of the plan.
        units: of pruning, all.
        mine: numbers of the units that this rank counts; each unit is one rank's.

    Raises:
        NaNError: a selected tensor holds NaN, and they are not to be kept; on every rank.
        SelectionError: more is to be pruned than there are numbers; on every rank.
        CheckpointError: the source cannot be read; on every rank.

    Cost: one read for every 16 bits of a key, and as many all-reduces of up to 512 KiB; no read
    for random scores. Memory: the histograms of this rank's units.
    """
    if plan.num_to_prune == 0 and not source.needs_values:
        return Decision(0, 0, [0] * len(units), {})
    descent = Descent(source.format().width, max(plan.num_to_prune, 1))
    num_nan: dict[str, int] = {}
    num_bytes = sum(unit.num_bytes for unit in units)
    num_passes, num_done = source.format().width // 16, 0
    ties = torch.zeros(len(units), dtype=torch.int64)
    while not descent.is_done:
        counting = _Counting(plan, source, units, mine, descent)
        steps = counting.steps()
        team.work(steps, "count", num_done * num_bytes, num_passes * num_bytes)
        histogram = team.sum(torch.from_numpy(counting.histogram)).numpy()
        if descent.is_first and source.needs_values:
            num_nan = _agree_on_nan(team, plan, source, counting.num_nan)
        digit = descent.narrow(histogram)
        for number, row in counting.rows.items():
            ties[number] = int(row[digit])
        num_done += 1
    if plan.num_to_prune == 0:
        return Decision(0, 0, [0] * len(units), num_nan)
    quotas, wanted = [], descent.rank + 1
    ties = team.sum(ties)
    for count in ties.tolist():
        quotas.append(min(count, wanted))
        wanted -= quotas[-1]
    return Decision(descent.prefix, int(ties.sum()), quotas, num_nan)


class _Counting:
    """One pass over this rank's units."""

    def __init__(
        self,
        plan: Plan,
        source: Source,
        units: Sequence[PruneUnit],
        mine: Sequence[int],
        descent: Descent,
    ) -> None:
        self.histogram = np.zeros(descent.num_bins, dtype=np.int64)
        self.rows: dict[int, Array] = {}
        self.num_nan = np.zeros(len(plan.tensors), dtype=np.int64)
        self._source = source
        self._units = units
        self._mine = mine
        self._descent = descent

    def steps(self) -> Iterator[int]:
        """Yields the bytes that were read."""
        source, descent = self._source, self._descent
        for number in self._mine:
            row = np.zeros(descent.num_bins, dtype=np.int64)
            for span in self._units[number].spans:
                chunks = source.chunks_of_keys(span.position, span.first, span.last, own=False)
                for keys, num_bytes in chunks:
                    row += descent.histogram(keys)
                    if descent.is_first:
                        num_nan = source.count_nan(keys, source.format())
                        self.num_nan[span.position] += num_nan
                    yield num_bytes
            self.histogram += row
            if descent.is_last:
                is_small = row.max() < 2**32
                self.rows[number] = row.astype(np.uint32) if is_small else row


def _agree_on_nan(team: Team, plan: Plan, source: Source, counts: Array) -> dict[str, int]:
    """NaN by tensor; raises on every rank if there must be none, or too few numbers are left."""
    shared = team.sum(torch.from_numpy(counts)).tolist()
    num_nan = {
        tensor.entry.name: count
        for tensor, count in zip(plan.tensors, shared, strict=True)
        if count
    }
    if num_nan and plan.recipe.nan == "error":
        raise source.nan_error(list(num_nan))
    num_numbers = plan.num_elements - sum(num_nan.values())
    if plan.num_to_prune > num_numbers:
        raise SelectionError(
            f"{plan.num_to_prune} elements are to be pruned, but only {num_numbers} are no NaN, "
            "and NaN are kept. Lower the sparsity."
        )
    return num_nan
