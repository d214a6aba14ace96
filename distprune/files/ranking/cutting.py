"""Which elements of a unit are pruned, in groups that are ranked together: their cuts, applied."""

from __future__ import annotations

from distprune.files.planning import Plan
from distprune.files.ranking.group_cuts import GroupCuts
from distprune.files.ranking.keys import Array
from distprune.files.ranking.lowest import Quota, Threshold
from distprune.files.ranking.searching import TensorCut
from distprune.files.ranking.streaming import Source
from distprune.files.ranking.units import Span


class Cutting:
    """The thresholds of the spans of one unit, which have to be cut in their order.

    Args:
        plan: what to do.
        source: of the plan; knows the divisors of groups that are normalised.
        group_cuts: of the plan.
        group: number of a group that is ranked together.
        unit: number of a unit of this group.
    """

    def __init__(
        self, plan: Plan, source: Source, group_cuts: GroupCuts, group: int, unit: int
    ) -> None:
        self._plan = plan
        self._source = source
        planned = plan.groups[group]
        self._has_limits = planned.has_limits
        self._first = planned.first
        # There are cuts for tensors of groups with limits only, in the order of the plan.
        num_earlier = sum(g.last - g.first for g in plan.groups[:group] if g.has_limits)
        num_tensors = planned.last - planned.first
        self._tensors = group_cuts.tensors[num_earlier : num_earlier + num_tensors]
        cut = group_cuts.cuts[group]
        # Without a cut only limits prune: no key is below 0.
        self._key = 0 if cut is None else cut.threshold
        self._quota = Quota(group_cuts.quotas[unit])

    def threshold(self, span: Span) -> Threshold:
        """Where a span is cut, by the keys of ``Source.cut_keys_of``."""
        if not self._has_limits:
            key, stop = self._interval(span, self._key)
            return Threshold(key, self._quota, stop)
        cut = self._tensors[span.position - self._first]
        key, stop = self._interval(span, cut.threshold)
        if span.last - span.first < self._plan.tensors[span.position].entry.numel:
            return Threshold(key, self._quota, stop)
        if cut.held_at is not None:
            return Threshold(key, Quota(cut.num_ties), stop)
        return _LimitedThreshold(key, cut, self._quota, stop)

    def _interval(self, span: Span, key: int) -> tuple[int, int | None]:
        """The keys of a tensor that tie with the key of a score."""
        scale = self._source.scale_of(span.position)
        return (key, None) if scale is None else scale.interval(key)


class _LimitedThreshold(Threshold):
    """The threshold of a group in a whole tensor whose floor and ceiling bound its ties.

        ties of the tensor    |<- num_ties ->|<- free ->|<- stay ->|
                              0           floor      ceiling = num_most

    The first ties have to be pruned for the floor; of the free ones as many are pruned as the
    group's quota for this unit still allows.

    Args:
        key, stop: as for :class:`Threshold`.
        cut: of the tensor.
        quota: of the ties that may be pruned in this tensor and the next ones.
    """

    def __init__(self, key: int, cut: TensorCut, quota: Quota, stop: int | None) -> None:
        super().__init__(key, quota, stop)
        self._bound = Quota(cut.num_ties)
        self._most = Quota(cut.num_most)
        self._free = quota

    def lowest(self, keys: Array) -> Array:
        lowest: Array = keys < keys.dtype.type(self._key)
        ties = self._ties(keys)
        ties = ties[: self._most.num_left]
        num_bound = self._bound.take(len(ties))
        num_free = self._free.take(len(ties) - num_bound)
        self._most.take(num_bound + num_free)
        lowest[ties[: num_bound + num_free]] = True
        return lowest
