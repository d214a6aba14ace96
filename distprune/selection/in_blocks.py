"""Pruning in blocks: rows, and N:M along the inputs, of parameters on any sharding.

Each block loses its lowest elements by itself, in the order (key, row-major index). Blocks that are
whole on a rank are ranked there, many at a time. Blocks that the sharding cuts are gathered, each
on one of the ranks: see cut_blocks.py. No rank gathers a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial

import torch
from torch import Tensor

from distprune.base.blocks import Blocks
from distprune.base.memory import Scratch, on_host
from distprune.ranks.collectives import Communicator
from distprune.selection.block_cuts import (
    NOWHERE,
    BlockedParameter,
    Places,
    Progressions,
    places_of,
    spans_of_ranges,
    to_progressions,
    union,
)
from distprune.selection.candidates import Candidates, Ranked
from distprune.selection.cut_blocks import CutBlocks, prune_cut
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
        On every rank.

    Cost: where blocks are whole, one read of the scores, two of the masks and memory for a chunk.
    For blocks that the sharding cuts, that of
    :func:`~distprune.selection.cut_blocks.prune_cut`. Two small all-reduces, and the texts of
    :meth:`~distprune.ranks.collectives.Communicator.distinct_texts` that say which blocks are
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
        in_bands, num_nan = _write_bands(ranked, outs, places)
        num_pruned.extend(in_bands)
        for position, parameter in enumerate(parameters):
            if parameter is None:
                continue
            part, own = parts[position], places[position]
            pruned, nan = _begin_rest(part, parameter.blocks, own, ranked.keys, outs[position])
            num_pruned[position] += pruned
            num_nan[position] += nan
        return torch.tensor(num_nan, dtype=torch.int64)

    num_nan = communicator.reduce(len(parts), write_whole).tolist()
    refuse_nan_in(ranked.names, ranked.num_live, num_nan)
    several = _agree_on_cut(ranked, parameters, places)
    if not several:
        return num_pruned
    in_cut = prune_cut(several, parts, places, ranked.keys, outs, communicator)
    return [whole + cut for whole, cut in zip(num_pruned, in_cut, strict=True)]


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
    part: Candidates, blocks: Blocks, places: Places, keys: KeyRange, out: Tensor
) -> tuple[int, int]:
    """Write what this rank can decide outside of bands; how many were pruned there, and are NaN."""
    for positions in places.rest:
        span = slice(positions.start, positions.stop)
        if part.live is None:
            out[span].fill_(1)
        else:
            out[span].copy_(part.live[span])
    scratch = Scratch()
    num_nan = sum(_count_nan(part, span, keys, scratch) for span in spans_of_ranges(places.rest))
    if not len(places.whole):
        return 0, num_nan
    alone = [CutBlocks(0, blocks, places.whole)]
    (pruned,) = prune_cut(alone, [part], [places], keys, [out], Communicator(()))
    return pruned, num_nan


def _count_nan(part: Candidates, span: range, keys: KeyRange, scratch: Scratch) -> int:
    """Live elements of a span that are NaN, and that this rank counts."""
    if not keys.is_float:
        return 0
    loaded, highest = part.keys.load(span.start, span.stop, scratch)
    if highest <= keys.largest_number:
        return 0
    are_nan = loaded[part.counted_in(span)] > keys.largest_number
    if part.live is not None:
        are_nan &= part.live[span.start : span.stop][part.counted_in(span)] == 1
    return int(are_nan.sum())


def _agree_on_cut(
    ranked: Ranked, parameters: Sequence[BlockedParameter | None], places: Sequence[Places]
) -> list[CutBlocks]:
    """The blocks that are cut, of each parameter that has some."""

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
    return [
        CutBlocks(position, blocks[position], union(found[position])) for position in sorted(found)
    ]
