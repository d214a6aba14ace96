"""Pruning in groups: rows, and N:M along the inputs, of parameters on any sharding.

Each group loses its lowest elements by itself, in the order (key, row-major index). Groups that are
whole on a rank are ranked there, many at a time. Groups that the sharding cuts are decided together
by the ranks that have their elements: see group_descent.py. No rank gathers a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.collectives import Communicator
from distprune._common.element_groups import Groups
from distprune._common.lowest_of_groups import lowest_of
from distprune._common.memory import Array, Count, Scratch, on_host
from distprune.selection.candidates import Candidates
from distprune.selection.group_descent import (
    MAX_SLOTS,
    GroupCuts,
    GroupsToCut,
    cut_groups,
    shifted_keys,
    slots_of,
)
from distprune.selection.group_places import (
    NOWHERE,
    GroupedParameter,
    Places,
    Progressions,
    places_of,
    spans_of_ranges,
    to_progressions,
    union,
)
from distprune.selection.keys import KeyRange
from distprune.selection.kth_key import nan_error

# Elements of whole blocks that are ranked at a time, unless a block has more.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class GroupedParts:
    """What is pruned in groups.

    Attributes:
        parts: this rank's part of every parameter, in the same order on all ranks.
        names: of the parameters, for messages.
        parameters: their groups; None where this rank has no element and does not know them.
        num_live: live elements of every whole parameter.
        outs: flat masks of the parts, uninitialised, contiguous.
        keys: the range of all keys.
        communicator: the ranks that have the parts.
    """

    parts: Sequence[Candidates]
    names: Sequence[str]
    parameters: Sequence[GroupedParameter | None]
    num_live: Sequence[int]
    outs: Sequence[Tensor]
    keys: KeyRange
    communicator: Communicator


def prune_in_groups(grouped: GroupedParts) -> list[int]:
    """Write the masks of this rank. Collective.

    Returns:
        Per parameter, how many elements that this rank counts were pruned now.

    Raises:
        ValueError: a live score is NaN, which names its parameters; ranks have different groups.
        RuntimeError: the scores changed between two reads. On every rank.

    Cost: where groups are whole, one read of the scores, two of the masks and memory for a chunk.
    For groups that the sharding cuts, that of
    :func:`~distprune.selection.group_descent.cut_groups`. Two small all-reduces, and the texts of
    :meth:`~distprune._common.collectives.Communicator.distinct_texts` that say which groups are
    cut: about 20 bytes for each regular layout of a parameter, else for every few groups.
    """
    communicator = grouped.communicator
    places: list[Places] = []

    def write_whole() -> Tensor:
        counts = []
        for position in range(len(grouped.parts)):
            own, num_nan = _write_whole(grouped, position)
            places.append(own)
            counts.append(num_nan)
        return torch.tensor(counts, dtype=torch.int64)

    num_nan = communicator.reduce(len(grouped.parts), write_whole).tolist()
    _refuse_nan(grouped, num_nan)
    for batch in _batches(_agree_on_cut(grouped, places)):
        several = [
            GroupsToCut(grouped.parts[position], position, groups, numbers, places[position].rest)
            for position, groups, numbers in batch
        ]
        cuts = cut_groups(several, grouped.keys, communicator)
        communicator.run(partial(_write_cuts, grouped, several, cuts))
    return communicator.run(lambda: _count_pruned(grouped))


def _write_whole(grouped: GroupedParts, position: int) -> tuple[Places, int]:
    """Write what one rank can decide alone; the places, and how many counted scores are NaN."""
    part, out, parameter = (
        grouped.parts[position], grouped.outs[position], grouped.parameters[position],
    )  # fmt: skip
    if part.live is None:
        out.fill_(1)
    else:
        out.copy_(part.live)
    if parameter is None:
        return NOWHERE, 0
    places = places_of(part, parameter)
    scratch = Scratch()
    step = max(_CHUNK // places.local.block, 1) * places.local.block
    num_nan = 0
    for start in range(places.blocks.start, places.blocks.stop, step):
        span = range(start, min(start + step, places.blocks.stop))
        keys = _live_keys(part, span, grouped.keys, scratch)
        num_nan += _count_nan(part, span, keys, grouped.keys)
        live = None if part.live is None else part.live[span.start : span.stop] == 1
        lowest = _lowest(keys, places.local)
        out[span.start : span.stop][lowest if live is None else lowest & live] = 0
    for span in spans_of_ranges(places.rest):
        num_nan += _count_nan(
            part, span, _live_keys(part, span, grouped.keys, scratch), grouped.keys
        )
    if len(places.whole):
        # Every replica decides all of its elements.
        everything = replace(part, counted=range(part.num_local))
        alone = [GroupsToCut(everything, position, parameter.groups, places.whole, places.rest)]
        _write_cuts(grouped, alone, cut_groups(alone, grouped.keys, Communicator(())))
    return places, num_nan


def _live_keys(part: Candidates, span: range, keys: KeyRange, scratch: Scratch) -> Tensor:
    """Keys of a span; those of elements that are pruned already are below all others."""
    loaded = part.keys.load(span.start, span.stop, scratch).values
    if part.live is not None:
        loaded = torch.where(part.live[span.start : span.stop] == 1, loaded, keys.low - 1)
    return loaded


def _count_nan(part: Candidates, span: range, loaded: Tensor, keys: KeyRange) -> int:
    if not keys.is_float:
        return 0
    first, last = max(span.start, part.counted.start), min(span.stop, part.counted.stop)
    counted = loaded[first - span.start : max(first, last) - span.start]
    return int((counted > keys.largest_number).sum())


def _lowest(keys: Tensor, groups: Groups) -> Tensor:
    """Which elements of whole blocks are pruned: bool, 1-d."""
    if memory.takes_numpy(keys.device):
        return torch.from_numpy(lowest_of(groups, keys.numpy()))
    blocks = keys.view(-1, groups.length, groups.columns, groups.kernel).transpose(1, 2)
    rows = blocks.reshape(-1, groups.size)
    first = rows.sort(dim=1, stable=True).indices[:, : groups.num_pruned]
    lowest = torch.zeros(rows.shape, dtype=torch.bool, device=keys.device).scatter_(1, first, True)
    return lowest.view(blocks.shape).transpose(1, 2).reshape(-1)


def _refuse_nan(grouped: GroupedParts, num_nan: Sequence[int]) -> None:
    where = [
        f"{name} ({count} of {live})"
        for name, live, count in zip(grouped.names, grouped.num_live, num_nan, strict=True)
        if count
    ]
    if where:
        raise nan_error(where)


def _agree_on_cut(
    grouped: GroupedParts, places: Sequence[Places]
) -> list[tuple[int, Groups, Array]]:
    """Per parameter that has groups which are cut: its position, its groups, and their numbers."""

    def describe() -> str:
        cut = {}
        for position, (own, parameter) in enumerate(zip(places, grouped.parameters, strict=True)):
            if len(own.cut) and parameter is not None:
                cut[position] = [astuple(parameter.groups), to_progressions(own.cut)]
        return json.dumps(cut)

    texts, _ = grouped.communicator.distinct_texts(grouped.communicator.run(describe))
    groups: dict[int, Groups] = {}
    found: dict[int, list[Progressions]] = {}
    for text in texts:
        for key, (fields, progressions) in json.loads(text).items():
            position = int(key)
            if groups.setdefault(position, Groups(*fields)) != Groups(*fields):
                raise ValueError(
                    f"{grouped.names[position]}: ranks would prune it in different groups "
                    f"({groups[position]}; and {Groups(*fields)}). Expected modules of the same "
                    "kind, and the same arguments, on every rank."
                )
            found.setdefault(position, []).append(progressions)
    return [(position, groups[position], union(found[position])) for position in sorted(found)]


def _batches(
    all_cut: Sequence[tuple[int, Groups, Array]],
) -> Iterator[list[tuple[int, Groups, Array]]]:
    """Parameters whose histograms are summed together."""
    batch: list[tuple[int, Groups, Array]] = []
    num_slots = 0
    for position, groups, numbers in all_cut:
        if batch and num_slots + len(numbers) > MAX_SLOTS:
            yield batch
            batch, num_slots = [], 0
        batch.append((position, groups, numbers))
        num_slots += len(numbers)
    if batch:
        yield batch


def _write_cuts(grouped: GroupedParts, several: Sequence[GroupsToCut], cuts: GroupCuts) -> None:
    """Zero what lies before the cuts, in all replicas."""
    scratch = Scratch()
    offset = 0
    for one in several:
        for span in spans_of_ranges(one.ranges):
            slots, places, inside = slots_of(one, span)
            keys = shifted_keys(one.part, span, grouped.keys, scratch)
            if inside is not None:
                keys = keys[inside]
            cut = cuts.keys[offset + slots]
            lowest = (keys < cut) | ((keys == cut) & (places <= cuts.places[offset + slots]))
            lowest &= keys > 0
            if inside is None:
                zeroed = lowest
            else:
                zeroed = inside.copy()
                zeroed[inside] = lowest
            out = grouped.outs[one.position][span.start : span.stop]
            out[torch.from_numpy(zeroed).to(out.device)] = 0
        offset += len(one.numbers)


def _count_pruned(grouped: GroupedParts) -> list[int]:
    counts: list[Count] = []
    for part, out in zip(grouped.parts, grouped.outs, strict=True):
        count: Count = 0
        for span in spans_of_ranges([part.counted]):
            pruned = out[span.start : span.stop] == 0
            if part.live is not None:
                pruned &= part.live[span.start : span.stop] == 1
            count = count + pruned.sum()
        counts.append(count)
    return on_host(counts)
