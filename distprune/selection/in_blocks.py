"""Pruning in blocks: rows, and N:M along the inputs, of parameters on any sharding.

Each block loses its lowest elements by itself, in the order (key, row-major index). Blocks that are
whole on a rank are ranked there, many at a time. Blocks that the sharding cuts are decided together
by the ranks that have their elements: see block_cuts.py. No rank gathers a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial

import torch
from torch import Tensor

from distprune._common.blocks import Blocks
from distprune._common.collectives import Communicator
from distprune._common.memory import Array, Count, Scratch, on_host
from distprune.selection.block_cuts import (
    MAX_SLOTS,
    NOWHERE,
    BlockCuts,
    BlockedParameter,
    BlocksToCut,
    Places,
    Progressions,
    cut_blocks,
    places_of,
    shifted_keys,
    slots_of,
    spans_of_ranges,
    to_progressions,
    union,
)
from distprune.selection.candidates import Candidates, Ranked
from distprune.selection.kernels import call_all, kernels_on, num_threads_for, spans_of
from distprune.selection.keys import KeyRange
from distprune.selection.kth_key import refuse_nan_in

# As much as a pass needs for its chunks, to rank some has twice the memory for each element.
_MEMORY_OF_RANKING = 2


def prune_in_blocks(
    ranked: Ranked, parameters: Sequence[BlockedParameter | None], outs: Sequence[Tensor]
) -> list[int]:
    """Write the masks of this rank. Collective.

    Args:
        ranked: what is pruned.
        parameters: the blocks; None where this rank has no element and does not know them.
        outs: flat masks of the parts, uninitialised, contiguous.

    Returns:
        Per parameter, how many elements that this rank counts were pruned now.

    Raises:
        ValueError: a live score is NaN, which names its parameters; ranks have different blocks.
        RuntimeError: the scores changed between two reads. On every rank.

    Cost: where blocks are whole, one read of the scores, two of the masks and memory for a chunk.
    For blocks that the sharding cuts, that of
    :func:`~distprune.selection.block_cuts.cut_blocks`. Two small all-reduces, and the texts of
    :meth:`~distprune._common.collectives.Communicator.distinct_texts` that say which blocks are
    cut: about 20 bytes for each regular layout of a parameter, else for every few blocks.
    """
    communicator, parts = ranked.communicator, ranked.parts
    places: list[Places] = []
    num_pruned: list[int] = []

    def write_whole() -> Tensor:
        places.extend(
            NOWHERE if parameter is None else places_of(part, parameter)
            for part, parameter in zip(parts, parameters, strict=True)
        )
        pruned, num_nan = _write_bands(ranked, outs, places)
        num_pruned.extend(pruned)
        for position, (own, parameter) in enumerate(zip(places, parameters, strict=True)):
            num_nan[position] += _begin_rest(ranked, position, parameter, own, outs)
        return torch.tensor(num_nan, dtype=torch.int64)

    num_nan = communicator.reduce(len(parts), write_whole).tolist()
    refuse_nan_in(ranked.names, ranked.num_live, num_nan)
    for batch in _batches(_agree_on_cut(ranked, parameters, places)):
        several = [
            BlocksToCut(parts[position], position, blocks, numbers, places[position].rest)
            for position, blocks, numbers in batch
        ]
        cuts = cut_blocks(several, ranked.keys, communicator)
        communicator.run(partial(_write_cuts, several, ranked.keys, outs, cuts))
    rest = communicator.run(lambda: _count_rest(parts, outs, places))
    return [in_blocks + others for in_blocks, others in zip(num_pruned, rest, strict=True)]


def _write_bands(
    ranked: Ranked, outs: Sequence[Tensor], places: Sequence[Places]
) -> tuple[list[int], list[int]]:
    """Write the masks of whole bands; how many counted elements were pruned, and are NaN."""
    chunks = []
    for position, (part, own) in enumerate(zip(ranked.parts, places, strict=True)):
        band = own.local.band
        bands = range(len(own.bands) // band)
        itemsize = _MEMORY_OF_RANKING * band * part.keys.dtype.itemsize
        for span in spans_of(bands, part.device, itemsize):
            first = own.bands.start + span.start * band
            chunks.append((position, range(first, first + len(span) * band)))
    calls = []
    for position, span in chunks:
        part = ranked.parts[position]
        calls.append(
            partial(
                kernels_on(part.device).write_lowest,
                part, span, places[position].local, ranked.keys, outs[position],
            )
        )  # fmt: skip
    found = call_all(calls, num_threads_for(ranked.parts, chunks))
    numbers = iter(on_host([count for counts in found for count in counts]))
    num_pruned, num_nan = [0] * len(places), [0] * len(places)
    for position, _ in chunks:
        num_pruned[position] += next(numbers)
        num_nan[position] += next(numbers)
    return num_pruned, num_nan


def _begin_rest(
    ranked: Ranked,
    position: int,
    parameter: BlockedParameter | None,
    places: Places,
    outs: Sequence[Tensor],
) -> int:
    """Write what this rank can decide of the elements outside of bands, and count NaN there."""
    part, out, keys = ranked.parts[position], outs[position], ranked.keys
    if parameter is None:
        places = replace(places, rest=(range(part.num_local),))
    for positions in places.rest:
        span = slice(positions.start, positions.stop)
        if part.live is None:
            out[span].fill_(1)
        else:
            out[span].copy_(part.live[span])
    if parameter is None:
        return 0
    scratch = Scratch()
    num_nan = sum(
        _count_nan(part, span, _live_keys(part, span, keys, scratch), keys)
        for span in spans_of_ranges(places.rest)
    )
    if len(places.whole):
        # Every replica decides all of its elements.
        everything = replace(part, counted=range(part.num_local))
        alone = [BlocksToCut(everything, position, parameter.blocks, places.whole, places.rest)]
        _write_cuts(alone, keys, outs, cut_blocks(alone, keys, Communicator(())))
    return num_nan


def _live_keys(part: Candidates, span: range, keys: KeyRange, scratch: Scratch) -> Tensor:
    """Keys of a span; those of elements that are pruned already are below all others."""
    loaded = part.keys.load(span.start, span.stop, scratch).values
    if part.live is not None:
        loaded = torch.where(part.live[span.start : span.stop] == 1, loaded, keys.low - 1)
    return loaded


def _count_nan(part: Candidates, span: range, loaded: Tensor, keys: KeyRange) -> int:
    if not keys.is_float:
        return 0
    return int((loaded[part.counted_in(span)] > keys.largest_number).sum())


def _agree_on_cut(
    ranked: Ranked, parameters: Sequence[BlockedParameter | None], places: Sequence[Places]
) -> list[tuple[int, Blocks, Array]]:
    """Per parameter that has blocks which are cut: its position, its blocks, and their numbers."""

    def describe() -> str:
        cut = {}
        for position, (own, parameter) in enumerate(zip(places, parameters, strict=True)):
            if len(own.cut) and parameter is not None:
                cut[position] = [astuple(parameter.blocks), to_progressions(own.cut)]
        return json.dumps(cut)

    texts, _ = ranked.communicator.distinct_texts(ranked.communicator.run(describe))
    blocks: dict[int, Blocks] = {}
    found: dict[int, list[Progressions]] = {}
    for text in texts:
        for key, (fields, progressions) in json.loads(text).items():
            position = int(key)
            if blocks.setdefault(position, Blocks(*fields)) != Blocks(*fields):
                raise ValueError(
                    f"{ranked.names[position]}: ranks would prune it in different blocks "
                    f"({blocks[position]}; and {Blocks(*fields)}). Expected modules of the same "
                    "kind, and the same arguments, on every rank."
                )
            found.setdefault(position, []).append(progressions)
    return [(position, blocks[position], union(found[position])) for position in sorted(found)]


def _batches(
    all_cut: Sequence[tuple[int, Blocks, Array]],
) -> Iterator[list[tuple[int, Blocks, Array]]]:
    """Parameters whose histograms are summed together."""
    batch: list[tuple[int, Blocks, Array]] = []
    num_slots = 0
    for position, blocks, numbers in all_cut:
        if batch and num_slots + len(numbers) > MAX_SLOTS:
            yield batch
            batch, num_slots = [], 0
        batch.append((position, blocks, numbers))
        num_slots += len(numbers)
    if batch:
        yield batch


def _write_cuts(
    several: Sequence[BlocksToCut], keys: KeyRange, outs: Sequence[Tensor], cuts: BlockCuts
) -> None:
    """Zero what lies before the cuts, in all replicas."""
    scratch = Scratch()
    offset = 0
    for one in several:
        for span in spans_of_ranges(one.ranges):
            slots, places, inside = slots_of(one, span)
            shifted = shifted_keys(one.part, span, keys, scratch)
            if inside is not None:
                shifted = shifted[inside]
            cut = cuts.keys[offset + slots]
            lowest = (shifted < cut) | ((shifted == cut) & (places <= cuts.places[offset + slots]))
            lowest &= shifted > 0
            if inside is None:
                zeroed = lowest
            else:
                zeroed = inside.copy()
                zeroed[inside] = lowest
            out = outs[one.position][span.start : span.stop]
            out[torch.from_numpy(zeroed).to(out.device)] = 0
        offset += len(one.numbers)


def _count_rest(
    parts: Sequence[Candidates], outs: Sequence[Tensor], places: Sequence[Places]
) -> list[int]:
    """Counted elements outside of bands that were pruned."""
    counts: list[Count] = []
    for part, out, own in zip(parts, outs, places, strict=True):
        count: Count = 0
        for span in spans_of_ranges(own.rest):
            counted = part.counted_in(span)
            pruned = out[span.start : span.stop][counted] == 0
            if part.live is not None:
                pruned &= part.live[span.start : span.stop][counted] == 1
            count = count + pruned.sum()
        counts.append(count)
    return on_host(counts)
