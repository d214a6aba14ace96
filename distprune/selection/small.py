"""Small parts on a CPU, many in one call of each operation.

A call costs microseconds, however few elements there are, and a model may have thousands of small
parameters. Their scores are copied side by side into a chunk of memory, where each of a batch is a
segment:

    scores     | 0 0 0 0 | 1 1 | 2 2 2 2 2 2 |      one array of keys, compared once
    bounds     0         4     6             12     where the segments begin and end

The scan drafts no masks of these parts: the pass that writes them reads them again, in the cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune.base.mask_values import is_one
from distprune.base.memory import INTEGERS, SERIAL, Array, Runs, Scratch
from distprune.selection import cpu
from distprune.selection.candidates import Candidates, Cut, Interval, PartCut
from distprune.selection.keys import KeyRange, Keys, ScoreKeys, keys_in, to_keys

# Masks that are counted together: at most 1 MiB of flags.
_MASKS = (1 << 20) // SERIAL


@dataclass(frozen=True)
class Batch:
    """Segments of some parts, side by side.

    Attributes:
        positions: of the parts in the list that they come from.
        parts: all have a mask in force of one dtype, or none; and scores of one dtype.
        spans: flat positions of the segments.
        bounds: where the segments begin and end in the batch: one number more than parts.
    """

    positions: list[int]
    parts: list[Candidates]
    spans: list[range]
    bounds: list[int]

    @property
    def common(self) -> KeyRange:
        """The range of the keys."""
        keys = self.parts[0].keys
        assert isinstance(keys, ScoreKeys)
        return keys.common

    def scores(self) -> Tensor:
        """The scores of all segments, one after the other, to be read."""
        scores = [
            part.keys.scores.load(span.start, span.stop)  # type: ignore[attr-defined]
            for part, span in zip(self.parts, self.spans, strict=True)
        ]
        return scores[0] if len(scores) == 1 else torch.cat(scores)

    def masks(self) -> Tensor | None:
        """The masks in force of all segments, one after the other; None if there are none."""
        masks = [
            part.live if len(span) == part.num_local else part.live[span.start : span.stop]
            for part, span in zip(self.parts, self.spans, strict=True)
            if part.live is not None
        ]
        return torch.cat(masks) if masks else None

    def load(self, scratch: Scratch) -> Keys:
        """The keys of all segments, one after the other."""
        return keys_in(self.scores(), self.common, scratch)

    def gather(self, runs: Runs, dead: int) -> Tensor:
        """:meth:`kernels.Kernels.gather` of runs of the batch."""
        keys, masks = to_keys(runs.of(self.scores()), self.common), self.masks()
        if masks is not None:
            keys.numpy()[(runs.of(masks) != 1).numpy()] = dead
        return keys

    def count(self, flags: Array) -> list[int]:
        """How many flags are set in each segment."""
        return [int(np.count_nonzero(flags[a:b])) for a, b in itertools.pairwise(self.bounds)]


def batches_of(
    parts: Sequence[Candidates], positions: Iterable[int], *, only_counted: bool
) -> Iterator[Batch]:
    """Small parts, in batches of about the size of a chunk.

    Args:
        parts: this rank's parameters.
        positions: of the small ones.
        only_counted: leave out what other ranks count.
    """
    kinds: dict[object, list[int]] = {}
    for position in positions:
        part = parts[position]
        assert isinstance(part.keys, ScoreKeys)
        mask_dtype = None if part.live is None else part.live.dtype
        kinds.setdefault((part.keys.scores.dtype, mask_dtype), []).append(position)
    for members in kinds.values():
        most = cpu.CHUNK_BYTES // parts[members[0]].keys.dtype.itemsize
        own = [parts[position] for position in members]
        spans = [part.counted if only_counted else range(part.num_local) for part in own]
        first, size = 0, 0
        for number, span in enumerate(spans):
            if size + len(span) > most and number > first:
                yield _batch(members[first:number], own[first:number], spans[first:number])
                first, size = number, 0
            size += len(span)
        yield _batch(members[first:], own[first:], spans[first:])


def _batch(positions: list[int], parts: list[Candidates], spans: list[range]) -> Batch:
    bounds = list(itertools.accumulate(map(len, spans), initial=0))
    return Batch(positions, parts, spans, bounds)


def scan(
    batch: Batch, pivots: Sequence[int], interval: Interval | None, scratch: Scratch
) -> tuple[list[list[int]], list[Tensor]]:
    """Count and collect the keys of each segment, as ``passes.scan`` does.

    Returns:
        Per segment: the live keys below the interval, and those up to each pivot; and the keys
        in the interval, 1-d.
    """
    loaded = batch.load(scratch)
    keys = loaded.values.numpy()
    integer, num_parts = keys.dtype.type, len(batch.parts)
    masks = batch.masks()
    live, num_live = None, [b - a for a, b in itertools.pairwise(batch.bounds)]
    if masks is not None:
        live = is_one(masks, out=scratch.array("live", keys.size, bool))
        num_live = batch.count(live)
    by_pivot: dict[int, list[int]] = {}
    num_below, sizes, collected = [0] * num_parts, [0] * num_parts, loaded.values[:0]
    if interval is not None:
        low, high = interval
        keep = np.greater_equal(keys, integer(low), out=scratch.array("keep", keys.size, bool))
        if live is not None:
            keep &= live
        num_below = [n - kept for n, kept in zip(num_live, batch.count(keep), strict=True)]
        inside = np.less_equal(keys, integer(high), out=scratch.array("inside", keys.size, bool))
        inside &= keep
        positions = np.flatnonzero(inside)
        collected = torch.from_numpy(keys[positions])
        sizes = np.diff(np.searchsorted(positions, batch.bounds)).tolist()
        by_pivot[low - 1] = num_below
        by_pivot[high] = [sum(pair) for pair in zip(num_below, sizes, strict=True)]
    for pivot in pivots:
        if pivot not in by_pivot and loaded.highest <= pivot:
            by_pivot[pivot] = num_live
        elif pivot not in by_pivot:
            upto = np.less_equal(keys, integer(pivot), out=scratch.array("inside", keys.size, bool))
            if live is not None:
                upto &= live
            by_pivot[pivot] = batch.count(upto)
    rows = [list(row) for row in zip(num_below, *(by_pivot[p] for p in pivots), strict=True)]
    return rows, list(collected.split_with_sizes(sizes))


def count_each_live(masks: Sequence[Tensor]) -> list[int]:
    """How many elements of each of some masks, 1-d, on the CPU, are exactly 1."""
    numbers = [0] * len(masks)
    of_dtype: dict[torch.dtype, list[int]] = {}
    for position, mask in enumerate(masks):
        of_dtype.setdefault(mask.dtype, []).append(position)
    for positions in of_dtype.values():
        for first in range(0, len(positions), _MASKS):
            some = positions[first : first + _MASKS]
            flags = is_one(torch.cat([masks[position] for position in some]))
            end = 0
            for position in some:
                start, end = end, end + masks[position].numel()
                numbers[position] = int(np.count_nonzero(flags[start:end]))
    return numbers


def can_write(part: Candidates, own: PartCut, out: Tensor) -> bool:
    """Whether :func:`write` writes a mask; not where the order is cut among the part's ties."""
    is_cut_inside = own.position == own.cut.parameter and own.cut.index > 0
    return not is_cut_inside and (part.live is None or part.live.dtype is out.dtype)


def write(
    batch: Batch, cuts: Sequence[PartCut], outs: Sequence[Tensor], scratch: Scratch
) -> list[int]:
    """Write the masks of a batch of whole parts: zero what lies before the cuts.

    Args:
        cuts, outs: of all parts of the list, as for ``passes.write_masks``.

    Returns:
        Per part of the batch, how many counted live elements were pruned.
    """
    keys = batch.load(scratch).values.numpy()
    firsts = [
        kept_from(cuts[position].position, cuts[position].cut) for position in batch.positions
    ]
    first: Array = np.array(firsts[:1], keys.dtype)
    if any(other != firsts[0] for other in firsts):
        first = np.repeat(np.array(firsts, keys.dtype), np.diff(batch.bounds))
    stay = np.greater_equal(keys, first, out=scratch.array("keep", keys.size, bool))
    masks = batch.masks()
    if masks is not None:
        # What does not compete stays as it is.
        live = is_one(masks, out=scratch.array("live", keys.size, bool))
        np.greater_equal(stay, live, out=stay)
    new = torch.from_numpy(stay)
    if masks is not None:
        new = masks.view(INTEGERS[masks.itemsize]).mul_(new).view(masks.dtype)
    numbers = []
    segments = torch.split(new, [len(span) for span in batch.spans])
    torch._foreach_copy_([outs[position] for position in batch.positions], segments)
    for part, start in zip(batch.parts, batch.bounds, strict=False):
        counted = part.counted
        kept = np.count_nonzero(stay[start + counted.start : start + counted.stop])
        numbers.append(len(counted) - int(kept))
    return numbers


def kept_from(position: int, cut: Cut) -> int:
    """The lowest key that a cut keeps of a parameter, but for ties at which its index cuts."""
    return cut.threshold + 1 if position < cut.parameter else cut.threshold
