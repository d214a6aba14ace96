"""Blocks that the sharding cuts: each is ranked on one rank, its owner, and by no other.

Many blocks make a batch, in which their elements have one place after the other. A rank sends the
keys of those elements that it has to the owners of their blocks, and says where they go::

    ranks that have the elements              owners: the first half of the batch, and the rest
      rank 0   0 0 0 0   keys
               1 1 1 1 ------------------->     rank 0   0 0 0 0 0 0 0 0   ranks whole blocks
               2 2 2 2                                   1 1 1 1 1 1 1 1
      rank 1   0 0 0 0    a bit for each
               1 1 1 1 <-------------------     rank 1   2 2 2 2 2 2 2 2
               2 2 2 2

A batch has as many elements for each rank as a chunk, so a call needs little memory; and an owner
has at least one block, however long.

[Note: keys or histograms] A row of float32 sends 4 bytes for each element that its owner has not,
and an eighth of a byte comes back. A radix descent over histograms of 16 bins, summed over all
ranks, sends 1 to 2 KiB per row in place of that: less, for long rows on few ranks. But it reads
every element 8 to 16 times, and took 12 times as long on 2 ranks (tests/benchmarks/TRIED.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distprune._common.blocks import Blocks
from distprune._common.collectives import Communicator
from distprune._common.memory import INTEGERS, Array, Scratch, takes_numpy
from distprune.selection.block_cuts import Places, pieces_of, spans_of_ranges
from distprune.selection.candidates import Candidates
from distprune.selection.cpu import lowest_of
from distprune.selection.kernels import spans_of
from distprune.selection.keys import KeyRange

# Elements of a batch for each rank.
_MOST = 1 << 19
_CPU = torch.device("cpu")


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

    Cost: one read of the elements; memory for about 20 bytes for each element of a chunk. For each
    batch an all-to-all of keys, one of bits, and two of 16 bytes per rank.
    See [Note: keys or histograms].
    """
    own = _Work(parts, places, keys, outs, [0] * len(parts))
    for batch in _batches(several, communicator.size):
        came = communicator.exchange(partial(own.send, batch))
        own.answers = communicator.exchange(partial(own.rank, batch, communicator.index, came))
    communicator.run(own.write)
    return own.num_pruned


@dataclass(frozen=True)
class _Batch:
    """Blocks that are ranked at a time, one after the other.

    Attributes:
        several: the blocks.
        firsts: where those of a parameter begin: elements before them.
        bounds: where the blocks of each rank may begin, and the end.
    """

    several: list[CutBlocks]
    firsts: list[int]
    bounds: Array

    def owned(self, index: int) -> list[tuple[int, int, Blocks]]:
        """Elements from, up to, and blocks of a rank; for each parameter of which it owns some."""
        found = []
        for (_, blocks, numbers), first in zip(self.several, self.firsts, strict=True):
            low, high = (
                min(max(-(-(int(bound) - first) // blocks.size), 0), len(numbers))
                for bound in self.bounds[index : index + 2]
            )
            if low < high:
                found.append((first + low * blocks.size, first + high * blocks.size, blocks))
        return found


def _batches(several: Sequence[CutBlocks], num_ranks: int) -> Iterator[_Batch]:
    batch: list[CutBlocks] = []
    left = _MOST * num_ranks
    for position, blocks, numbers in several:
        start = 0
        while start < len(numbers):
            if batch and left < blocks.size:
                yield _batch(batch, num_ranks)
                batch, left = [], _MOST * num_ranks
            stop = start + max(1, left // blocks.size)
            batch.append(CutBlocks(position, blocks, numbers[start:stop]))
            left -= len(batch[-1].numbers) * blocks.size
            start = stop
    if batch:
        yield _batch(batch, num_ranks)


def _batch(several: list[CutBlocks], num_ranks: int) -> _Batch:
    sizes = [len(one.numbers) * one.blocks.size for one in several]
    *firsts, total = itertools.accumulate(sizes, initial=0)
    bounds = [-(-total * rank // num_ranks) for rank in range(num_ranks + 1)]
    return _Batch(several, firsts, np.array(bounds))


@dataclass(frozen=True)
class _Message:
    """What a rank sends of a batch.

    Attributes:
        shares: per owner: int64, the number of grids, and four words of each (:class:`_Grid`); and
            the keys of their elements, in scratch memory.
        num_keys: per owner.
        order: where the keys were before they were put in the order of blocks; None: there.
        spans: position of a parameter, a span of its positions, and flags of those that are sent;
            None if all are.
    """

    shares: list[list[Array]]
    num_keys: list[int]
    order: Array | None
    spans: list[tuple[int, range, Array | None]]


class _Grid(NamedTuple):
    """Where elements go in a batch: pieces of equal length, at equal steps."""

    first: int
    step: int
    number: int
    length: int

    def of(self, flat: Array, base: int) -> Array:
        """The elements, [count, length], a view of the batch from ``base`` on."""
        n = flat.itemsize
        shape, strides = (self.number, self.length), (self.step * n, n)
        found: Array = np.ndarray(shape, flat.dtype, flat, (self.first - base) * n, strides)
        return found


def _grids(owner: Array, target: Array, length: Array, num_ranks: int) -> list[Array]:
    """Per owner, int64: the number of grids that pieces make, and the words of each."""
    # Pieces that follow each other are one.
    is_new = (target[1:] != (target + length)[:-1]) | (owner[1:] != owner[:-1])
    heads = np.concatenate([np.zeros(min(len(owner), 1), int), np.flatnonzero(is_new) + 1])
    owner, target, length = owner[heads], target[heads], np.add.reduceat(length, heads)
    steps = target[1:] - target[:-1]
    is_alike = (length[1:] == length[:-1]) & (owner[1:] == owner[:-1])
    goes_on = is_alike.copy()
    goes_on[1:] &= steps[1:] == steps[:-1]
    found: list[list[_Grid]] = [[] for _ in range(num_ranks)]
    first = 0
    for end in [*(np.flatnonzero(~goes_on) + 1).tolist(), len(target)]:
        if end == first or (end == first + 1 < len(target) and is_alike[first]):
            continue  # the second piece of a grid gives its step
        step = int(steps[first]) if end > first + 1 else 0
        grid = _Grid(int(target[first]), step, end - first, int(length[first]))
        found[int(owner[first])].append(grid)
        first = end
    return [np.array([len(grids), *itertools.chain(*grids)], dtype=np.int64) for grids in found]


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


@dataclass
class _Work:
    """The local steps of this rank.

    Attributes:
        parts, places, keys, outs: as for :func:`prune_cut`.
        num_pruned: so far, per parameter.
        answers: of the owners, to the last message.
    """

    parts: Sequence[Candidates]
    places: Sequence[Places]
    keys: KeyRange
    outs: Sequence[Tensor]
    num_pruned: list[int]
    answers: list[Array] = field(default_factory=list)
    _message: _Message | None = None
    _scratch: Scratch = field(default_factory=Scratch)

    def send(self, batch: _Batch) -> list[list[Array]]:
        """Write what was decided of the batch before, and collect what the owners need."""
        self.write()
        self._message = self._collect(batch)
        return self._message.shares

    def rank(self, batch: _Batch, index: int, came: Sequence[Array]) -> list[list[Array]]:
        """Per rank, a bit for each key that came from it: whether the element is pruned."""
        dtype = self._dtype
        owned = batch.owned(index)
        base, end = (owned[0][0], owned[-1][1]) if owned else (0, 0)
        numbers = self._scratch.array("owned", end - base, dtype)
        of_ranks: list[list[_Grid]] = []
        for piece in came:
            stop = 8 * (1 + 4 * int(piece[:8].view(np.int64)[0]))
            words, sent = piece[8:stop].view(np.int64), piece[stop:].view(dtype)
            of_ranks.append([_Grid(*each) for each in words.reshape(-1, 4).tolist()])
            start = 0
            for grid in of_ranks[-1]:
                elements = grid.of(numbers, base)
                elements[...] = sent[start : start + elements.size].reshape(elements.shape)
                start += elements.size
        lowest = self._scratch.array("chosen", end - base, bool)
        for first, last, blocks in owned:
            in_rows = Blocks(blocks.size, 1, 1, blocks.num_pruned)
            size = blocks.size
            for some in spans_of(range((last - first) // size), _CPU, 2 * size * dtype.itemsize):
                rows = slice(first - base + some.start * size, first - base + some.stop * size)
                lowest[rows] = lowest_of(in_rows, numbers[rows], self._scratch)
        answers = []
        for grids in of_ranks:
            flags = [grid.of(lowest, base).reshape(-1) for grid in grids]
            answers.append([np.packbits(np.concatenate([lowest[:0], *flags]))])
        return answers

    def write(self) -> None:
        """Zero what the owners have chosen, and count it."""
        message = self._message
        if message is None:
            return
        answers = zip(self.answers, message.num_keys, strict=True)
        bits = [np.unpackbits(answer, count=number) for answer, number in answers]
        lowest: Array = np.concatenate(bits).view(bool)
        if message.order is not None:
            ordered = lowest
            lowest = np.empty_like(ordered)
            lowest[message.order] = ordered
        start = 0
        for position, span, sent in message.spans:
            part, out = self.parts[position], self.outs[position][span.start : span.stop]
            stop = start + (len(span) if sent is None else int(np.count_nonzero(sent)))
            zeroed = lowest[start:stop]
            start = stop
            if sent is not None:
                zeroed, chosen = sent.copy(), zeroed
                zeroed[sent] = chosen
            if part.live is not None:
                zeroed &= (part.live[span.start : span.stop] == 1).cpu().numpy()
            self.num_pruned[position] += int(np.count_nonzero(zeroed[part.counted_in(span)]))
            if takes_numpy(out.device) and out.itemsize in INTEGERS:
                values = out.view(INTEGERS[out.itemsize]).numpy()
                np.multiply(values, np.logical_not(zeroed), out=values)
            else:
                out[torch.from_numpy(zeroed).to(out.device)] = 0

    def _collect(self, batch: _Batch) -> _Message:
        empty: Array = np.zeros(0, dtype=np.int64)
        owners, targets, lengths, numbers = [empty], [empty], [empty], [empty]
        num_before = 0
        spans: list[tuple[int, range, Array | None]] = []
        for one, first in zip(batch.several, batch.firsts, strict=True):
            part = self.parts[one.position]
            for span in spans_of_ranges(_ranges(part, one, self.places[one.position].rest)):
                pieces = pieces_of(part, one.blocks, span)
                slots, inside = _slots(one.numbers, pieces.numbers)
                flags = None
                if not inside.all():
                    flags = np.repeat(inside, pieces.lengths)
                    slots = slots[inside]
                begins = first + slots * one.blocks.size
                owners.append(np.searchsorted(batch.bounds, begins, side="right") - 1)
                targets.append(begins + pieces.places[inside])
                lengths.append(pieces.lengths[inside])
                numbers.append(num_before + slots)
                spans.append((one.position, span, flags))
            num_before += len(one.numbers)
        owner, target, length, number = map(np.concatenate, (owners, targets, lengths, numbers))
        values = self._scratch.array("values", int(length.sum()), self._dtype)
        start = 0
        for position, span, flags in spans:
            loaded = self._live_keys(self.parts[position], span)
            loaded = loaded if flags is None else loaded[flags]
            values[start : start + len(loaded)] = loaded
            start += len(loaded)
        order = None
        if (number[1:] < number[:-1]).any():
            # Integers of 16 bits have a radix sort.
            small = number.astype(np.uint16) if num_before <= 1 << 16 else number
            by_block = np.argsort(small, kind="stable")
            positions = np.cumsum(length) - length
            owner, target, length = owner[by_block], target[by_block], length[by_block]
            order = _expand(positions[by_block], length)
            values = values[order]
        num_ranks = len(batch.bounds) - 1
        num_keys = np.bincount(owner, length, num_ranks).astype(np.int64)
        grids = _grids(owner, target, length, num_ranks)
        of_owners = np.split(values, np.cumsum(num_keys)[:-1])
        shares = [[*pair] for pair in zip(grids, of_owners, strict=True)]
        return _Message(shares, num_keys.tolist(), order, spans)

    def _live_keys(self, part: Candidates, span: range) -> Array:
        """Keys of a span; elements that are pruned already come before all others."""
        loaded = part.keys.load(span.start, span.stop, self._scratch).values
        if part.live is not None:
            loaded = torch.where(part.live[span.start : span.stop] == 1, loaded, self.keys.low - 1)
        return loaded.cpu().numpy()

    @property
    def _dtype(self) -> np.dtype:
        return torch.empty(0, dtype=self.keys.dtype).numpy().dtype
