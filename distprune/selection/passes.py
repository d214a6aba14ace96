"""The passes over this rank's scores and masks: chunk by chunk, so that scratch memory stays small.

Selection decides what to count and where to cut; the kernels do it for a chunk (kernels.py).

[Note: draft] The scan that counts around the k-th key also writes masks, as if the order were cut
where its interval begins. Once the cut is known, only the elements that were collected in the
interval are corrected, a fraction of a percent:

    keys       0 ............ low ....... cut ....... high ............ max
    draft      0 0 0 0 0 0 0 | 1 1 1 1 1 1 1 1 1 1 1 1 | 1 1 1 1 1 1 1 1
    final      0 0 0 0 0 0 0 | 0 0 0 0 0 0 1 1 1 1 1 1 | 1 1 1 1 1 1 1 1
                              collected: visited again

Drafts are new tensors until all ranks have theirs, so they can be thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import Count, Scratch, join, on_host, select
from distprune.selection import candidates, small
from distprune.selection.candidates import (
    Candidates,
    ChunkScan,
    Collected,
    Cut,
    Interval,
    PartCut,
)
from distprune.selection.kernels import (
    call_all,
    chunks_of,
    counted_spans,
    fused_chunks_of,
    fused_for,
    kernels_on,
    num_threads,
    num_threads_for,
    spans_of,
)
from distprune.selection.radix import Descent


@dataclass(frozen=True)
class Scan:
    """What one pass over this rank's parameters counted and collected.

    Attributes:
        counts: per parameter, the counted live keys <= each pivot.
        num_below: per parameter, the counted live keys below the interval; 0 without one.
        interval: of keys.
        collected: per parameter, the elements in the interval, chunk by chunk; none of a small
            part, whose mask is not drafted either (small.py).
        keys: the counted keys in the interval, 1-d, parameter by parameter; on the device that has
            all of them, or on the CPU ...
        sizes: ... and how many of each.
    """

    counts: list[list[int]]
    num_below: list[int]
    interval: Interval | None
    collected: list[list[Collected]]
    keys: Tensor
    sizes: list[int]


def count_live(live: Tensor | None, counted: range) -> int:
    """Elements of a flat mask, among the counted ones, that compete."""
    return count_each_live([live], [counted])[0]


def count_each_live(live: Sequence[Tensor | None], counted: Sequence[range]) -> list[int]:
    """:func:`count_live` of several masks; waits for a device once."""
    few: dict[int, Tensor] = {}
    chunks = []
    for position, (mask, positions) in enumerate(zip(live, counted, strict=True)):
        if mask is None:
            continue
        if memory.takes_numpy(mask.device) and 0 < len(positions) <= candidates.MOST_ELEMENTS:
            is_whole = len(positions) == mask.numel()
            few[position] = mask if is_whole else mask[positions.start : positions.stop]
            continue
        spans = spans_of(positions, mask.device, mask.itemsize)
        chunks += [(position, mask[span.start : span.stop]) for span in spans]
    calls = [partial(kernels_on(chunk.device).count_live, chunk) for _, chunk in chunks]
    on_threads = all(kernels_on(chunk.device).USES_THREADS for _, chunk in chunks)
    num_elements = sum(chunk.numel() for _, chunk in chunks)
    numbers = on_host(call_all(calls, num_threads(num_elements, len(calls)) if on_threads else 1))
    totals = [
        len(positions) if mask is None else 0 for mask, positions in zip(live, counted, strict=True)
    ]
    for (position, _), number in zip(chunks, numbers, strict=True):
        totals[position] += number
    for position, number in zip(few, small.count_each_live([*few.values()]), strict=True):
        totals[position] = number
    return totals


def scan(
    parts: Sequence[Candidates],
    pivots: Sequence[int],
    interval: Interval | None,
    drafts: Sequence[Tensor] | None = None,
    expected_share: float = 1.0,
) -> Scan:
    """One pass over the counted elements, or over all local ones if there are drafts to write.

    Args:
        parts: this rank's parameters.
        pivots: keys.
        interval: closed interval of keys to collect, or None.
        drafts: flat masks, uninitialised, one per part: see [Note: draft]. Written if there is
            an interval.
        expected_share: about which fraction of all elements lies in the interval. A chunk in which
            a device meets many more is scanned again.
    """
    outs = drafts if drafts is not None and interval is not None else None
    totals = [[0] * (1 + len(pivots)) for _ in parts]
    collected: list[list[Collected]] = [[] for _ in parts]

    def add(position: int, elements: Collected | None, row: Sequence[int]) -> None:
        if elements is None or elements.is_counted:
            totals[position] = [
                total + count for total, count in zip(totals[position], row, strict=True)
            ]

    fused, taken = fused_for(parts, outs)
    if fused is not None:
        chunks = fused_chunks_of(fused, parts, taken, only_counted=outs is None)
        found = fused.scan(parts, chunks, pivots, interval, outs, expected_share)
        for (position, _), result, (number, *row) in zip(
            chunks, found, _on_host(found, 2 + len(pivots)), strict=True
        ):
            add(position, result.collected, row)
            if result.collected is not None and number:
                collected[position].append(result.collected)
    in_batches = [position for position, part in enumerate(parts) if part.is_small]
    keys_in_batches: dict[int, Tensor] = {}
    for batch in small.batches_of(parts, in_batches, only_counted=True):
        rows, of_parts = small.scan(batch, pivots, interval, Scratch())
        for position, row, keys in zip(batch.positions, rows, of_parts, strict=True):
            totals[position] = row
            keys_in_batches[position] = keys
    left_out = {*taken, *in_batches}
    others = [position for position in range(len(parts)) if position not in left_out]
    chunks = chunks_of(parts, only_counted=outs is None, positions=others)
    calls = []
    for position, span in chunks:
        part = parts[position]
        out = None if outs is None else outs[position]
        capacity = min(len(span), int(4 * expected_share * len(span)) + 1024)
        kernel = kernels_on(part.device).scan
        calls.append(partial(kernel, part, span, pivots, interval, out, capacity=capacity))
    results = call_all(calls, num_threads_for(parts, chunks) if calls else 1)
    rows = _on_host(results, 2 + len(pivots))
    for (position, _), call, result, (number, *row) in zip(
        chunks, calls, results, rows, strict=True
    ):
        elements = result.collected
        add(position, elements, row)
        if elements is not None and number > elements.positions.numel():
            elements = call(Scratch(), capacity=None).collected
        if elements is not None and number:
            collected[position].append(elements.first(number))
    counted = [[chunk.keys for chunk in of_part if chunk.is_counted] for of_part in collected]
    for position, keys in keys_in_batches.items():
        counted[position] = [keys]
    return Scan(
        [row[1:] for row in totals],
        [row[0] for row in totals],
        interval,
        collected,
        join([keys for of_part in counted for keys in of_part]),
        [sum(keys.numel() for keys in of_part) for of_part in counted],
    )


def _on_host(results: Sequence[ChunkScan], length: int) -> list[list[int]]:
    """Per chunk: how many elements were collected, how many lie below, and the other counts."""
    counts: list[Count] = []
    for result in results:
        number = 0 if result.collected is None else result.collected.number
        counts += [number, result.num_below, *result.counts]
    numbers = on_host(counts)
    return [numbers[start : start + length] for start in range(0, len(numbers), length)]


def write_masks(
    parts: Sequence[Candidates],
    cuts: Sequence[PartCut],
    outs: Sequence[Tensor],
    drafted: Scan | None = None,
) -> list[int]:
    """Write the masks of this rank: zero what lies before the cuts, and no other live element.

    The one place where masks become final. Drafted masks are corrected where they are wrong;
    others are written, chunk by chunk.

    Args:
        parts: this rank's parameters.
        cuts: of each part.
        outs: flat masks, one per part, contiguous.
        drafted: the scan that drafted ``outs``, of the same parts in the same order. All cuts are
            one then.

    Returns:
        Per parameter, how many counted live elements were pruned.

    Cost: one pass over the parts without a valid draft; with one, over the collected elements only.
    """
    counts: list[Count | None] = [None] * len(parts)
    if drafted is not None:
        counts = finish_drafts(drafted, parts, cuts[0].cut, outs)
    at = [(own.position, own.cut) for own in cuts]
    fused, taken = fused_for(parts, outs, at) if None in counts else (None, {})
    if fused is not None:
        anew = [position for position in taken if counts[position] is None]
        chunks = fused_chunks_of(fused, parts, anew, only_counted=False)
        numbers = fused.write(parts, chunks, at, outs)
        for position in anew:
            counts[position] = numbers[position]
    in_batches = [
        position
        for position, (part, own) in enumerate(zip(parts, cuts, strict=True))
        if counts[position] is None and part.is_small and small.can_write(part, own, outs[position])
    ]
    for batch in small.batches_of(parts, in_batches, only_counted=False):
        pruned = small.write(batch, cuts, outs, Scratch())
        for position, number in zip(batch.positions, pruned, strict=True):
            counts[position] = number
    for position, (part, own) in enumerate(zip(parts, cuts, strict=True)):
        if counts[position] is None:
            counts[position] = write_keep(part, own.position, own.cut, outs[position], part.live)
    return on_host([count for count in counts if count is not None])


def finish_drafts(
    scanned: Scan, parts: Sequence[Candidates], cut: Cut, drafts: Sequence[Tensor]
) -> list[Count | None]:
    """Correct drafted masks without another pass; see [Note: draft].

    Args:
        scanned: the scan that drafted them.
        parts: the parameters that were scanned, and cut, in this order.
        cut: where the order is cut.
        drafts: flat masks of the parts, all of them.

    Returns:
        Per parameter, how many counted live elements were pruned; None if there is no draft of it,
        or one for a cut that lies elsewhere, and the mask has to be written anew.

    Cost: only the elements that were collected in the interval are visited.
    """
    assert scanned.interval is not None
    low, high = scanned.interval
    if not low <= cut.threshold <= high:
        return [
            scanned.num_below[position]
            if _is_exact(position, cut, low) and not part.is_small
            else None
            for position, part in enumerate(parts)
        ]

    at = [(position, cut) for position in range(len(parts))]
    fused, taken = fused_for(parts, drafts, at)
    counts: list[Count | None] = [*scanned.num_below]
    if fused is not None:
        elements = {position: scanned.collected[position] for position in taken}
        numbers = fused.prune_collected(parts, elements, cut, drafts)
        for position in taken:
            counts[position] = scanned.num_below[position] + numbers[position]
    for position, part in enumerate(parts):
        if position in taken:
            continue
        if part.is_small:
            counts[position] = None
            continue
        num_pruned: Count = scanned.num_below[position]
        kernel = kernels_on(part.device).prune_collected
        for collected in scanned.collected[position]:
            number = kernel(part, position, cut, collected, drafts[position])
            if collected.is_counted:
                num_pruned = num_pruned + number
        counts[position] = num_pruned
    return counts


def _is_exact(position: int, cut: Cut, low: int) -> bool:
    """Whether a draft that keeps all keys from ``low`` on is the mask of a cut elsewhere."""
    return small.kept_from(position, cut) == low and (position != cut.parameter or cut.index == 0)


def indices_at(part: Candidates, key: int, low: int, high: int) -> Iterator[Tensor]:
    """Global indices in [low, high) of the counted live elements with a key, chunk by chunk."""
    scratch = Scratch()
    for span in counted_spans(part):
        positions = kernels_on(part.device).positions_of(part, span, key, scratch)
        if positions.numel():
            indices = part.index(positions)
            if low > 0 or high < part.numel:
                indices = select(indices, (indices >= low).logical_and_(indices < high))
            yield indices.cpu()


def count_in_bins(part: Candidates, key: int, bins: Descent) -> Tensor:
    """Counted live elements with a key, by bins of their global indices: int64 [bins.num_bins].

    Args:
        part: whose index is ascending, so that the elements of a bin lie side by side.
        key: the key.
        bins: of global indices.
    """
    edges = ((bins.low >> bins.shift) + np.arange(bins.num_bins + 1)) << bins.shift
    edges[0], edges[-1] = bins.low, bins.high + 1
    counted = part.counted
    bounds = part.index.positions_of(edges).clip(counted.start, counted.stop)
    spans = list(
        spans_of(range(int(bounds[0]), int(bounds[-1])), part.device, part.keys.dtype.itemsize)
    )
    kernel = kernels_on(part.device).count_key
    firsts, calls = [], []
    for span in spans:
        low = int(np.searchsorted(bounds, span.start, "right")) - 1
        high = int(np.searchsorted(bounds, span.stop, "left"))
        cuts = bounds[low : high + 1].clip(span.start, span.stop) - span.start
        firsts.append(low)
        calls.append(partial(kernel, part, span, key, cuts.tolist()))
    threads = num_threads_for([part], [(0, span) for span in spans])
    totals = np.zeros(bins.num_bins, dtype=np.int64)
    for low, of_span in zip(firsts, call_all(calls, threads), strict=True):
        totals[low : low + len(of_span)] += of_span
    return torch.from_numpy(totals)


def write_keep(
    part: Candidates, position: int, cut: Cut, out: Tensor, previous: Tensor | None
) -> Count:
    """Write the mask of a parameter: zero what lies before the cut, leave the rest.

    Args:
        part: the local part; all of it is written, not only what is counted.
        position: of the parameter in the caller's list.
        cut: where the order is cut.
        out: flat mask, any dtype; contiguous.
        previous: flat mask whose values survivors keep; None: they become 1. It may be ``out``.

    Returns:
        How many counted live elements were pruned.
    """
    chunks = chunks_of([part], only_counted=False)
    kernel = kernels_on(part.device).write
    calls = [partial(kernel, part, span, position, cut, out, previous) for _, span in chunks]
    pruned = call_all(calls, num_threads_for([part], chunks))
    return sum(
        number
        for (_, span), number in zip(chunks, pruned, strict=True)
        if span.start in part.counted
    )
