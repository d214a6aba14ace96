"""Exact selection over all ranks: find where the total order is cut after k elements.

The order is (key of the score, position of the parameter in the caller's list,
row-major index in the whole parameter). Ranks exchange counts and histograms,
never scores:

1. a sample brackets the k-th key (bracket.py);
2. one scan counts the keys around the bracket, collects those inside it, and can draft the
   masks (passes.py);
3. the k-th key is radix-selected among the collected ones (kth_key.py, radix.py);
4. the ties at that key are cut by parameter, then by index, the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from distprune.base.memory import concatenate
from distprune.ranks.collectives import Communicator
from distprune.selection.candidates import Candidates, Cut, Ranked
from distprune.selection.kth_key import Reading
from distprune.selection.passes import Scan, count_in_bins, indices_at
from distprune.selection.radix import (
    Search,
    Step,
    changed,
    descent_over,
    histogram_of,
    narrowed,
    within,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Selection:
    """A cut, and facts about it that are the same on all ranks.

    Attributes:
        cut: where the total order is cut.
        num_ties: elements whose key equals the threshold; ...
        num_ties_pruned: ... and how many of them come before the cut.
        num_before: per whole parameter, its elements before the cut.
        drafted: the scan that drafted masks; None without drafts. It may have drafted them for
            another cut.
    """

    cut: Cut
    num_ties: int
    num_ties_pruned: int
    num_before: list[int]
    drafted: Scan | None = None


def select_lowest(
    ranked: Ranked,
    k: int,
    *,
    drafts: Sequence[Tensor] | None = None,
    count_each: bool = False,
) -> Selection:
    """Cut the total order of all live elements after exactly ``k`` of them.

    Args:
        ranked: what is ranked.
        k: elements before the cut, 0 <= k <= sum(ranked.num_live).
        drafts: flat masks, uninitialised, one per part, to draft during the scan;
            see passes.[Note: draft].
        count_each: whether to count ``Selection.num_before``, which is empty otherwise.

    Raises:
        ValueError: a live score is NaN, and NaN are refused; names its parameters. On every rank.
        RuntimeError: the scores changed between two scans.

    Cost: one scan of the scores (more when a bracket misses, or more keys lie in it than may be
    collected) and about ten all-reduces of up to 32 KiB; memory for the collected keys, about 0.5 %
    of them at 10**8 elements and less above.
    """
    search = search_lowest(ranked, k, drafts=drafts, count_each=count_each)
    shared: Tensor | None = None  # a generator is started by sending None
    while True:
        try:
            size, step = search.send(shared)  # type: ignore[arg-type]
        except StopIteration as finished:
            selection: Selection = finished.value
            return selection
        shared = ranked.communicator.reduce(size, step)


def search_together(searches: Sequence[Search[T]], communicator: Communicator) -> list[T]:
    """Run the same searches on every rank, side by side; their results.

    The steps that all of them wait for share one all-reduce.
    """
    results: dict[int, T] = {}
    # By number of a search, the sums to send it; a generator is started by sending None.
    sums: dict[int, Tensor | None] = dict.fromkeys(range(len(searches)))
    while sums:
        steps: dict[int, Step] = {}
        for number, shared in sums.items():
            try:
                steps[number] = searches[number].send(shared)  # type: ignore[arg-type]
            except StopIteration as finished:
                results[number] = finished.value
        sums = _sum_together(steps, communicator) if steps else {}
    return [results[number] for number in range(len(searches))]


def _sum_together(steps: dict[int, Step], communicator: Communicator) -> dict[int, Tensor | None]:
    """The sums of all steps, by one all-reduce."""

    def take() -> Tensor:
        return torch.cat([step() for _, step in steps.values()])

    sizes = [size for size, _ in steps.values()]
    sums = torch.split(communicator.reduce(sum(sizes), take), sizes)
    return dict(zip(steps, sums, strict=True))


def search_lowest(
    ranked: Ranked,
    k: int,
    *,
    drafts: Sequence[Tensor] | None = None,
    count_each: bool = False,
) -> Search[Selection]:
    """:func:`select_lowest` as a search that can run beside others."""
    parts, keys = ranked.parts, ranked.keys
    nothing = Selection(Cut(keys.low, 0, 0), 0, 0, [0] * len(parts))
    if k == 0 and not (ranked.refuse_nan and keys.is_float):
        return nothing
    reading = Reading(ranked, drafts)
    kth = yield from reading.find(max(k, 1))
    if k == 0:
        return nothing

    num_ties, num_ties_pruned = kth.num_ties, k - kth.num_below
    if num_ties_pruned == num_ties and not count_each:
        cut = Cut(kth.threshold, len(parts), 0)
        return Selection(cut, num_ties, num_ties, [], reading.drafted)

    def count() -> Tensor:
        below, ties = kth.counts()
        return torch.tensor([*ties, *below] if count_each else ties, dtype=torch.int64)

    size = len(parts) * (2 if count_each else 1)
    ties, *below = torch.split((yield size, count), len(parts))
    if int(ties.sum()) != num_ties:
        raise changed()
    ties_before = torch.cat([torch.zeros(1, dtype=torch.int64), ties.cumsum(0)])
    # Ties go parameter by parameter, until enough of them are pruned.
    pruned_of_ties = torch.minimum((num_ties_pruned - ties_before[:-1]).clamp(min=0), ties)
    num_before = (below[0] + pruned_of_ties).tolist() if below else []
    if num_ties_pruned == num_ties:
        cut = Cut(kth.threshold, len(parts), 0)
    else:
        position = int(torch.searchsorted(ties_before[1:], num_ties_pruned))
        index = yield from cut_ties(
            parts[position],
            kth.threshold,
            num_ties_pruned - int(ties_before[position]),
            lambda: kth.indices_of_ties(parts[position], position),
        )
        cut = Cut(kth.threshold, position, index)
    facts = num_ties, num_ties_pruned, num_before
    return Selection(cut, *facts, reading.drafted)


# At most so many indices of ties are kept; for more, the next round scans the parameter again.
_KEPT = 1 << 16


def cut_ties(
    part: Candidates, key: int, num_pruned: int, collected: Callable[[], Tensor | None]
) -> Search[int]:
    """The global index below which exactly ``num_pruned`` elements of a parameter have a key.

    Radix selection over the indices of the ties: of those that a scan has collected, if one has.
    Otherwise, where later positions of a shard have larger indices, each bin is a run of the shard,
    and its ties are counted: one scan of this parameter, and then of one bin. Elsewhere, in memory
    that is not row-major, one scan of this parameter finds the indices, or two when there are more
    ties than are kept.

    Args:
        collected: global indices of this rank's ties, or None.
    """
    descent = descent_over(0, part.numel - 1, num_pruned - 1)
    ties: Tensor | None = None
    is_first = True

    def count_bins() -> Tensor:
        nonlocal ties, is_first
        if is_first:
            ties, is_first = collected(), False
        if ties is None and part.index.is_ascending:
            return count_in_bins(part, key, descent)
        if ties is not None:
            ties = within(ties, descent.low, descent.high)
            return histogram_of(ties, descent)
        histogram = torch.zeros(descent.num_bins, dtype=torch.int64)
        kept, num_ties = [], 0
        for indices in indices_at(part, key, descent.low, descent.high + 1):
            histogram += histogram_of(indices, descent)
            num_ties += indices.numel()
            if num_ties <= _KEPT:
                kept.append(indices)
        if num_ties <= _KEPT:
            ties = concatenate(kept)
        return histogram

    while not descent.is_done:
        descent, num_ties = narrowed(descent, (yield descent.num_bins, count_bins))
        if descent.rank == num_ties - 1:  # all ties of the bin are pruned, as if there are few
            return descent.high + 1
    return descent.low + 1
