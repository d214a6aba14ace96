"""Cuts of many groups at once, of elements that any number of ranks have.

A radix descent finds the k-th key of each group, four bits a step: one histogram of 16 bins per
group, summed over all ranks. Where only some of the elements with that key are pruned, a second
descent, over their places in the group, finds the last one of them::

    group 0   |bins of bits 28 to 31|  ...  |bins of bits 0 to 3|  ->  key, and place of the cut
    group 1   |                     |  ...  |                   |
    ...           all groups of many parameters in one sum over the ranks

[Note: histograms or elements] A group of float32 takes 8 sums of 16 words of 8 bytes, and less than
that again for ties: 1 to 2 KiB, however many elements it has. To send the elements themselves
would take 8 bytes each, so rows of more than 128 to 256 elements cost less by histograms. Bins of 8
bits would need half as many reads of the elements, but 8 KiB per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune._common.collectives import Communicator
from distprune._common.element_groups import Groups
from distprune._common.memory import Array, Scratch
from distprune.selection.candidates import Candidates
from distprune.selection.group_places import number_and_place, spans_of_ranges
from distprune.selection.keys import KeyRange
from distprune.selection.radix import changed

_BITS = 4
_BINS = 1 << _BITS
# Groups whose histograms are summed at a time, unless one parameter has more: 8 MiB.
MAX_SLOTS = 1 << 16


@dataclass(frozen=True)
class GroupsToCut:
    """Groups of one parameter that are to be cut.

    Attributes:
        part: this rank's part of the parameter.
        position: of the parameter.
        groups: of the whole parameter.
        numbers: of the groups, ascending; the same on all ranks.
        ranges: flat positions of this part that have all of their elements, and perhaps others.
    """

    part: Candidates
    position: int
    groups: Groups
    numbers: Array
    ranges: tuple[range, ...]


@dataclass(frozen=True)
class GroupCuts:
    """Where each group is cut: smaller keys go, and of equal ones those up to a place.

    Attributes:
        keys: uint64 [slots], shifted: see :func:`shifted_keys`.
        places: int64 [slots].
    """

    keys: Array
    places: Array


def cut_groups(
    several: Sequence[GroupsToCut], keys: KeyRange, communicator: Communicator
) -> GroupCuts:
    """Find the cuts of all groups, slot after slot in the order of ``several``. Collective.

    Args:
        several: the same groups on all ranks.
        keys: the range of all keys.
        communicator: the ranks that have the elements.

    Raises:
        RuntimeError: the scores changed between two reads.

    Cost: one read of the elements for every four bits of a key, and for ties of a place; memory
    and an all-reduce of 128 bytes per group for each. See [Note: histograms or elements].
    """
    num_slots = sum(len(one.numbers) for one in several)
    num_pruned = np.concatenate(
        [np.full(len(one.numbers), one.groups.num_pruned, dtype=np.int64) for one in several]
    )
    num_bits = (keys.high - keys.low + 1).bit_length()

    def chunks_of_keys() -> Iterator[tuple[Array, Array]]:
        for slots, shifted, _ in counted_chunks(several, keys):
            yield slots, shifted

    found, ranks, num_ties = _descend(
        chunks_of_keys, num_slots, num_pruned - 1, num_bits, communicator
    )
    largest = max((one.groups.size for one in several), default=1)
    places = np.full(num_slots, np.iinfo(np.int64).max, dtype=np.int64)
    ties = np.flatnonzero(ranks + 1 < num_ties)
    if not len(ties):
        return GroupCuts(found, places)
    slot_of = np.full(num_slots, -1, dtype=np.int64)
    slot_of[ties] = np.arange(len(ties))

    def chunks_of_places() -> Iterator[tuple[Array, Array]]:
        for slots, shifted, at in counted_chunks(several, keys):
            tied = (shifted == found[slots]) & (slot_of[slots] >= 0)
            yield slot_of[slots[tied]], at[tied].view(np.uint64)

    last, _, _ = _descend(
        chunks_of_places, len(ties), ranks[ties], (largest - 1).bit_length(), communicator
    )
    places[ties] = last.view(np.int64)
    return GroupCuts(found, places)


def counted_chunks(
    several: Sequence[GroupsToCut], keys: KeyRange
) -> Iterator[tuple[Array, Array, Array]]:
    """Slot, shifted key and place of the elements that this rank counts, chunk by chunk."""
    scratch = Scratch()
    offset = 0
    for one in several:
        counted = one.part.counted
        ranges = [range(max(r.start, counted.start), min(r.stop, counted.stop)) for r in one.ranges]
        for span in spans_of_ranges(ranges):
            slots, places, inside = slots_of(one, span)
            shifted = shifted_keys(one.part, span, keys, scratch)
            if inside is not None:
                shifted = shifted[inside]
            yield slots + offset, shifted, places
        offset += len(one.numbers)


def slots_of(one: GroupsToCut, span: range) -> tuple[Array, Array, Array | None]:
    """Slots and places of those elements of a span that are in the groups, and bool: which are.

    The last one is None if all are.
    """
    numbers, places = number_and_place(one.part, one.groups, span)
    if len(one.numbers) and len(one.numbers) == one.numbers[-1] + 1:
        slots, inside = numbers, numbers < len(one.numbers)
    else:
        slots = np.searchsorted(one.numbers, numbers)
        np.minimum(slots, max(len(one.numbers) - 1, 0), out=slots)
        inside = one.numbers[slots] == numbers
    if inside.all():
        return slots, places, None
    return slots[inside], places[inside], inside


def shifted_keys(part: Candidates, span: range, keys: KeyRange, scratch: Scratch) -> Array:
    """Keys as uint64, from 1 on; 0 for elements that are pruned already, which come first."""
    loaded = part.keys.load(span.start, span.stop, scratch).values.cpu().numpy()
    shifted: Array = loaded.astype(np.int64).view(np.uint64) - np.uint64((keys.low - 1) % (1 << 64))
    if part.live is not None:
        shifted[part.live[span.start : span.stop].cpu().float().numpy() != 1] = 0
    return shifted


def _descend(
    chunks: Callable[[], Iterator[tuple[Array, Array]]],
    num_slots: int,
    ranks: Array,
    num_bits: int,
    communicator: Communicator,
) -> tuple[Array, Array, Array]:
    """The number of a given rank among those of each slot.

    Args:
        chunks: reads slots, and numbers as uint64.
        num_slots: how many there are; the same on all ranks.
        ranks: int64 [num_slots], from 0.
        num_bits: of the numbers.
        communicator: the ranks.

    Returns:
        Per slot, the number; its rank among equal numbers; and how many equal ones there are.
    """
    found = np.zeros(num_slots, dtype=np.uint64)
    ranks = ranks.copy()
    sizes = np.zeros(num_slots, dtype=np.int64)
    shift = max(num_bits - 1, 0) // _BITS * _BITS

    def count() -> torch.Tensor:
        totals = np.zeros(num_slots * _BINS, dtype=np.int64)
        for slots, numbers in chunks():
            bins = numbers >> np.uint64(shift)
            same = (bins >> np.uint64(_BITS)) == found[slots]
            bins, slots = (bins & np.uint64(_BINS - 1)).view(np.int64)[same], slots[same]
            if len(slots):
                bins += slots * _BINS
                first = int(bins.min())
                counts = np.bincount(bins - first)
                totals[first : first + len(counts)] += counts
        return torch.from_numpy(totals)

    while shift >= 0:
        bins = communicator.reduce(num_slots * _BINS, count).numpy().reshape(num_slots, _BINS)
        sums = np.cumsum(bins, axis=1)
        if num_slots and not (sums[:, -1] > ranks).all():
            raise changed()
        chosen = (sums <= ranks[:, None]).sum(axis=1)
        rows = np.arange(num_slots)
        sizes = bins[rows, chosen]
        ranks -= sums[rows, chosen] - sizes
        found = (found << np.uint64(_BITS)) | chosen.astype(np.uint64)
        shift -= _BITS
    return found, ranks, sizes
