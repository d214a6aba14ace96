"""Blocks that the sharding cuts: their keys are gathered, a batch of blocks at a time.

In a batch the elements of many blocks have one place after the other. Each rank writes the keys of
the elements that it counts at their places, between zeros, and the sum over the ranks is the batch.
Every rank then ranks all blocks of the batch, and writes the masks of its own elements::

    rank 0    7 3 1 5 0 0 0 0   2 8 4 4 0 0 0 0
    rank 1    0 0 0 0 6 2 9 1   0 0 0 0 5 3 7 1
    sum       7 3 1 5 6 2 9 1   2 8 4 4 5 3 7 1       two blocks of eight elements

Keys of 16 and 32 bits share words of 64 bits, so an element takes as many bytes as its key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune.base.blocks import Blocks
from distprune.base.memory import INTEGERS, Array, Scratch, takes_numpy
from distprune.ranks.collectives import Communicator
from distprune.selection.block_cuts import Places, pieces_of, spans_of_ranges
from distprune.selection.candidates import Candidates
from distprune.selection.cpu import lowest_of
from distprune.selection.keys import KeyRange

# Elements of a batch; a batch has at least one block.
_MOST = 1 << 20


class CutBlocks(NamedTuple):
    """Blocks of one parameter; the same on all ranks.

    Attributes:
        position: of the parameter.
        blocks: of the whole parameter.
        numbers: int64, of the blocks, ascending.
    """

    position: int
    blocks: Blocks
    numbers: Array


def prune_cut(
    several: Sequence[CutBlocks],
    parts: Sequence[Candidates],
    places: Sequence[Places],
    keys: KeyRange,
    outs: Sequence[Tensor],
    communicator: Communicator,
) -> list[int]:
    """Zero the lowest elements of blocks that are cut, in the masks of this rank. Collective.

    Args:
        several: the same on all ranks.
        parts: of this rank, all parameters.
        places: of these parts. Elements of the blocks lie in the ``rest``.
        keys: the range of all keys.
        outs: flat masks of the parts, which hold the masks in force.
        communicator: the ranks that have the elements.

    Returns:
        Per parameter, how many elements that this rank counts were pruned.

    Cost: one read of the elements; an all-reduce of each key; every rank ranks every block. Memory
    for about 40 bytes for each element of a batch.
    """
    own = _Work(parts, places, keys, outs, communicator.size == 1, [0] * len(parts))
    done: tuple[_Batch, Tensor] | None = None

    def send(batch: _Batch, done: tuple[_Batch, Tensor] | None) -> Tensor:
        if done is not None:
            own.write(*done)
        return own.collect(batch)

    for batch in _batches(several):
        words = communicator.reduce(own.num_words(batch), partial(send, batch, done))
        done = batch, words
    if done is not None:
        communicator.run(partial(own.write, *done))
    return own.num_pruned


@dataclass(frozen=True)
class _Batch:
    """Blocks that are ranked at a time, one after the other.

    Attributes:
        several: the blocks.
        firsts: for each parameter, how many elements come before its blocks; and the end.
    """

    several: list[CutBlocks]
    firsts: list[int]


def _batches(several: Sequence[CutBlocks]) -> Iterator[_Batch]:
    batch: list[CutBlocks] = []
    left = _MOST
    for position, blocks, numbers in several:
        start = 0
        while start < len(numbers):
            if batch and left < blocks.size:
                yield _batch(batch)
                batch, left = [], _MOST
            stop = start + max(1, left // blocks.size)
            batch.append(CutBlocks(position, blocks, numbers[start:stop]))
            left -= len(batch[-1].numbers) * blocks.size
            start = stop
    if batch:
        yield _batch(batch)


def _batch(several: list[CutBlocks]) -> _Batch:
    sizes = (len(one.numbers) * one.blocks.size for one in several)
    return _Batch(several, [*itertools.accumulate(sizes, initial=0)])


class _Found(NamedTuple):
    """Elements of a batch in a span of a local part.

    Attributes:
        position: of the parameter.
        span: flat positions.
        are_inside: bool, which positions of the span belong to the batch; None: all of them.
        targets: int64, where these are in the batch.
    """

    position: int
    span: range
    are_inside: Array | None
    targets: Array


@dataclass
class _Work:
    """The local steps of this rank.

    Attributes:
        parts, places, keys, outs: as for :func:`prune_cut`.
        is_alone: whether no other rank ranks these blocks; then replicas are not told apart.
        num_pruned: so far, per parameter.
    """

    parts: Sequence[Candidates]
    places: Sequence[Places]
    keys: KeyRange
    outs: Sequence[Tensor]
    is_alone: bool
    num_pruned: list[int]

    def num_words(self, batch: _Batch) -> int:
        """Words of 64 bits that hold the keys of a batch."""
        return -(-batch.firsts[-1] * self.keys.dtype.itemsize // 8)

    def collect(self, batch: _Batch) -> Tensor:
        """The words of a batch with the keys that this rank counts."""
        words = torch.zeros(self.num_words(batch), dtype=torch.int64)
        # Unsigned, and relative to the key of what is pruned already: all other keys are larger.
        numbers = words.numpy().view(self._unsigned)
        scratch = Scratch()
        for position, span, are_inside, targets in self._find(batch):
            part = self.parts[position]
            loaded = part.keys.load(span.start, span.stop, scratch).values
            if part.live is not None:
                is_live = part.live[span.start : span.stop] == 1
                loaded = torch.where(is_live, loaded, self.keys.low - 1)
            sent = np.full(len(span), self.is_alone)
            sent[part.counted_in(span)] = True
            if are_inside is None:
                targets = targets[sent]
            else:
                targets = targets[sent[are_inside]]
                sent &= are_inside
            relative = loaded.cpu().numpy()[sent].view(self._unsigned)
            numbers[targets] = relative - self._lowest
        return words

    def write(self, batch: _Batch, words: Tensor) -> None:
        """Rank the blocks of a batch, zero their lowest elements, and count these."""
        numbers = words.numpy().view(self._unsigned) + self._lowest
        signed = numbers.view(f"int{8 * numbers.itemsize}")
        lowest = np.empty(batch.firsts[-1], dtype=bool)
        for one, ends in zip(batch.several, itertools.pairwise(batch.firsts), strict=True):
            in_rows = Blocks(one.blocks.size, 1, 1, one.blocks.num_pruned)
            lowest[slice(*ends)] = lowest_of(in_rows, signed[slice(*ends)])
        for position, span, are_inside, targets in self._find(batch):
            part, out = self.parts[position], self.outs[position][span.start : span.stop]
            zeroed = lowest[targets]
            if are_inside is not None:
                zeroed, chosen = are_inside.copy(), zeroed
                zeroed[are_inside] = chosen
            if part.live is not None:
                zeroed &= (part.live[span.start : span.stop] == 1).cpu().numpy()
            self.num_pruned[position] += int(np.count_nonzero(zeroed[part.counted_in(span)]))
            if takes_numpy(out.device) and out.itemsize in INTEGERS:
                values = out.view(INTEGERS[out.itemsize]).numpy()
                np.multiply(values, np.logical_not(zeroed), out=values)
            else:
                out[torch.from_numpy(zeroed).to(out.device)] = 0

    def _find(self, batch: _Batch) -> Iterator[_Found]:
        """The elements of a batch that this rank has."""
        for one, first in zip(batch.several, batch.firsts, strict=False):
            part = self.parts[one.position]
            for span in spans_of_ranges(_ranges(part, one, self.places[one.position].rest)):
                pieces = pieces_of(part, one.blocks, span)
                slots, inside = _slots(one.numbers, pieces.numbers)
                starts = first + slots * one.blocks.size + pieces.places
                if inside.all():
                    yield _Found(one.position, span, None, _expand(starts, pieces.lengths))
                elif inside.any():
                    are_inside = np.repeat(inside, pieces.lengths)
                    targets = _expand(starts[inside], pieces.lengths[inside])
                    yield _Found(one.position, span, are_inside, targets)

    @property
    def _unsigned(self) -> np.dtype:
        return np.dtype(f"uint{8 * self.keys.dtype.itemsize}")

    @property
    def _lowest(self) -> np.unsignedinteger:
        """The key of what is pruned already, as an unsigned integer of the same bits."""
        bits = 8 * self.keys.dtype.itemsize
        lowest: np.unsignedinteger = self._unsigned.type((self.keys.low - 1) % (1 << bits))
        return lowest


def _ranges(part: Candidates, one: CutBlocks, rest: Sequence[range]) -> list[range]:
    """Ranges that have all elements of some blocks, and perhaps others."""
    if not part.index.is_ascending:
        return list(rest)
    blocks = one.blocks
    bands = [int(one.numbers[0]) // blocks.columns, int(one.numbers[-1]) // blocks.columns + 1]
    start, stop = part.index.positions_of(np.array(bands) * blocks.band).tolist()
    return [range(max(each.start, start), min(each.stop, stop)) for each in rest]


def _slots(numbers: Array, wanted: Array) -> tuple[Array, Array]:
    """Where numbers are among ascending ones, and bool: whether they are there."""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        slots = wanted - numbers[0]
        return slots, (slots >= 0) & (slots < len(numbers))
    slots = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    return slots, numbers[slots] == wanted


def _expand(starts: Array, lengths: Array) -> Array:
    """The integers of some runs."""
    first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return first + np.arange(len(first))
