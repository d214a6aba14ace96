"""Which elements of a unit are pruned, in groups that are ranked together: their cuts, applied."""

from __future__ import annotations

import numpy as np

from distprune.files.planning import Plan
from distprune.files.ranking.group_cuts import GroupCuts
from distprune.files.ranking.keys import Array
from distprune.files.ranking.lowest import Threshold
from distprune.files.ranking.searching import TensorCut
from distprune.files.ranking.units import Span


class Cutting:
    """The thresholds of the spans of one unit, which have to be cut in their order.

    Args:
        plan: what to do.
        group_cuts: of the plan.
        group: number of a group that is ranked together.
        unit: number of a unit of this group.
    """

    def __init__(self, plan: Plan, group_cuts: GroupCuts, group: int, unit: int) -> None:
        self._plan = plan
        planned = plan.groups[group]
        self._has_limits = planned.has_limits
        self._first = planned.first
        # There are cuts for tensors of groups with limits only, in the order of the plan.
        num_earlier = sum(g.last - g.first for g in plan.groups[:group] if g.has_limits)
        num_tensors = planned.last - planned.first
        self._tensors = group_cuts.tensors[num_earlier : num_earlier + num_tensors]
        cut = group_cuts.cuts[group]
        # Without a cut only limits prune: no key is below 0.
        key = 0 if cut is None else cut.threshold
        self._shared = Threshold(key, group_cuts.quotas[unit])

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
    """The threshold of a group in a whole tensor whose floor and ceiling bound its ties.

        ties of the tensor    |<- num_ties ->|<- free ->|<- stay ->|
                              0           floor      ceiling = num_most

    The first ties have to be pruned for the floor; of the free ones as many are pruned as the
    group's quota for this unit still allows.

    Args:
        cut: of the tensor.
        shared: has the number of ties that may be pruned in this tensor and the next ones.
    """

    def __init__(self, cut: TensorCut, shared: Threshold) -> None:
        super().__init__(cut.threshold, cut.num_ties)
        self._num_most = cut.num_most
        self._shared = shared

    def lowest(self, keys: Array) -> Array:
        key = keys.dtype.type(self.key)
        lowest: Array = keys < key
        ties = np.flatnonzero(keys == key)[: self._num_most]
        num_bound = min(len(ties), self.num_ties)
        num_free = min(len(ties) - num_bound, self._shared.num_ties)
        lowest[ties[: num_bound + num_free]] = True
        self.num_ties -= num_bound
        self._num_most -= num_bound + num_free
        self._shared.num_ties -= num_free
        return lowest
