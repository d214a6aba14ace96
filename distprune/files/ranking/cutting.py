"""Which elements of a unit go, in groups that are ranked together: the decision, applied."""

from __future__ import annotations

import numpy as np

from distprune.files.planning import Plan
from distprune.files.ranking.deciding import Decision
from distprune.files.ranking.scores import Array, Threshold
from distprune.files.ranking.searching import TensorCut
from distprune.files.ranking.units import PruneUnit, Span


class Cutting:
    """The thresholds of the spans of one unit, which have to be cut in their order.

    Args:
        plan: what is to be done.
        decision: of the plan.
        number, unit: of a group that is ranked together.
    """

    def __init__(self, plan: Plan, decision: Decision, number: int, unit: PruneUnit) -> None:
        self._plan = plan
        group = plan.groups[unit.group]
        self._has_limits = group.has_limits
        self._first = group.first
        # In the order of the plan, without the tensors of groups that have no limits.
        before = sum(g.last - g.first for g in plan.groups[: unit.group] if g.has_limits)
        self._tensors = decision.tensors[before : before + group.last - group.first]
        cut = decision.cuts[unit.group]
        # Without a cut nothing goes but what limits hold: no key is below 0.
        key = 0 if cut is None else cut.threshold
        self._shared = Threshold(key, decision.quotas[number])

    def threshold(self, span: Span) -> Threshold:
        """Where a span is cut."""
        if not self._has_limits:
            return self._shared
        cut = self._tensors[span.position - self._first]
        if span.last - span.first < self._plan.tensors[span.position].entry.numel:
            return Threshold(cut.threshold, self._shared.num_ties)
        if cut.held_at is not None:
            return Threshold(cut.threshold, cut.num_ties)
        return _LimitedThreshold(cut, self._shared)


class _LimitedThreshold(Threshold):
    """The threshold of a group in a whole tensor: some ties have to go, and only so many may.

    Args:
        cut: of the tensor.
        shared: has the number of ties that may go in this and the next tensors.
    """

    def __init__(self, cut: TensorCut, shared: Threshold) -> None:
        super().__init__(cut.threshold, cut.num_ties)
        self._num_most = cut.num_most
        self._shared = shared

    def lowest(self, keys: Array) -> Array:
        key = keys.dtype.type(self.key)
        lowest = keys < key
        ties = np.flatnonzero(keys == key)[: self._num_most]
        num_bound = min(len(ties), self.num_ties)
        num_free = min(len(ties) - num_bound, self._shared.num_ties)
        lowest[ties[: num_bound + num_free]] = True
        self.num_ties -= num_bound
        self._num_most -= num_bound + num_free
        self._shared.num_ties -= num_free
        return lowest
