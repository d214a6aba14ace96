"""The passes over this rank's shards: chunk by chunk, so that scratch memory stays small.

A chunk is a run of one shard, or several small shards of one kind side by side, because each
operation costs microseconds however few elements there are::

    keys       | 0 0 0 0 | 1 1 | 2 2 2 2 2 2 |      one array, compared once
    bounds     0         4     6             12     where the pieces begin and end
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import SERIAL, Array, Scratch
from distprune.ranking import cpu, device
from distprune.shards.geometry import IndexMap
from distprune.shards.shard import Shard

# With fewer elements in a chunk, threads would wait for each other more than they work.
_THREADED_CHUNK = 1 << 17
# More threads than this spend their time on waiting for the interpreter's lock.
_MAX_THREADS = 8

R = TypeVar("R")
# bool, one for each element: an array on a CPU, a tensor on other devices.
Flags = Any


@dataclass(frozen=True)
class Part:
    """Elements that no model has: of a file, or of one plain tensor. Attributes as of ``Shard``."""

    name: str
    numel: int
    index: IndexMap
    counted: range
    flat_mask: Tensor | None = None


# What is ranked.
Elements = Shard | Part


class Chunk:
    """Some pieces of shards of one kind.

    Args:
        pieces: (number of the shard, start, stop) of each, in flat positions.
        is_counted: whether this rank counts the elements, all of them or none.
        are_whole: whether the pieces are whole shards, which need no slices.

    Attributes:
        shards: int64, the numbers of the shards.
        sizes: int64, of the pieces.
        bounds: int64, where they begin and end: one number more than pieces.
        starts: int64: what leads from positions in the chunk to those in the shard, of each piece.
        is_single: whether there is one piece.
    """

    def __init__(
        self, pieces: Sequence[tuple[int, int, int]], is_counted: bool, are_whole: bool = False
    ) -> None:
        self.pieces, self.is_counted, self.are_whole = pieces, is_counted, are_whole
        self.is_single = len(pieces) == 1
        table = np.array(pieces)
        self.shards: Array = table[:, 0]
        self.sizes: Array = table[:, 2] - table[:, 1]
        self.bounds: Array = np.zeros(len(pieces) + 1, dtype=np.int64)
        self.sizes.cumsum(out=self.bounds[1:])
        self.starts: Array = table[:, 1] - self.bounds[:-1]

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def cut(self, most: int) -> Iterator[Chunk]:
        """Chunks of at most ``most`` elements; small pieces that are joined stay so."""
        if not self.is_single or self.sizes[0] <= most:
            yield self
            return
        ((number, start, stop),) = self.pieces
        for span in spans_of(range(start, stop), most):
            yield Chunk([(number, span.start, span.stop)], self.is_counted)

    def of(self, flat: Sequence[Any]) -> Tensor:
        """Its elements of flat tensors, one per shard of the rank; a view if there is one piece."""
        found = self.parts_of(flat)
        return found[0] if self.is_single else torch.cat(found)

    def parts_of(self, flat: Sequence[Any]) -> list[Tensor]:
        """The same, as a list of the pieces."""
        if self.are_whole:
            return [flat[number] for number, _, _ in self.pieces]
        return [flat[number][start:stop] for number, start, stop in self.pieces]


def spread(values: Array, sizes: Array, dtype: torch.dtype) -> int | Array:
    """A number of each piece, as one number if all are equal, else as an array of the elements."""
    first = int(values[0])
    if len(values) == 1 or (values == first).all():
        return first
    return np.repeat(values.astype(f"i{dtype.itemsize}"), sizes)


def operations_on(where: torch.device) -> ModuleType:
    """The functions that touch every element: numpy's on a CPU, torch's operations elsewhere."""
    return cpu if memory.takes_numpy(where) else device


def spans_of(positions: range, most: int) -> Iterator[range]:
    """Cut a range into ranges of about equal size, of at most ``most`` positions."""
    # Of equal size: each costs some calls, however small it is.
    size = max(1, -(-len(positions) // max(1, -(-len(positions) // max(1, most)))))
    for start in range(positions.start, positions.stop, size):
        yield range(start, min(start + size, positions.stop))


def join_small(
    pieces: Iterable[tuple[Hashable, tuple[int, int, int], bool, bool]], most: int
) -> list[Chunk]:
    """Join small pieces of one kind to chunks of at most ``most`` elements; others stay alone.

    Args:
        pieces: the kind of each, the piece as in :class:`Chunk`, whether this rank counts it, and
            whether it is a whole shard.
    """
    chunks = []
    # Of each kind, the pieces of the chunk that is not full, and how many elements they have.
    open_: dict[Hashable, tuple[list[tuple[int, int, int]], int]] = {}
    for kind, piece, is_counted, is_whole in pieces:
        size = piece[2] - piece[1]
        kind = kind, is_counted, is_whole
        if size > SERIAL:
            chunks.append(Chunk([piece], is_counted, is_whole))
        elif size:
            joined, total = open_.get(kind, ([], 0))
            if total + size > most and joined:
                chunks.append(Chunk(joined, is_counted, is_whole))
                joined, total = [], 0
            joined.append(piece)
            open_[kind] = joined, total + size
    return chunks + [Chunk(joined, *kind[1:]) for kind, (joined, _) in open_.items()]  # type: ignore[index]


def call_all(call: Callable[..., R], items: Sequence[tuple[Any, ...]], are_safe: bool) -> list[R]:
    """Map a function over items, on several threads where that is safe and worth it.

    Args:
        call: gets what an item has, and a thread's scratch memory.
        items: arguments of the calls; the last of each is a chunk, or a range of elements.
        are_safe: whether they may run on several threads.

    Returns:
        The results, in the order of the items.
    """
    most = min(torch.get_num_threads(), _MAX_THREADS, len(items)) if are_safe else 1
    if most < 2 or sum([len(item[-1]) for item in items]) < _THREADED_CHUNK * len(items):
        scratch = Scratch()
        return list(itertools.starmap(call, [(*item, scratch) for item in items]))
    results: list[Any] = [None] * len(items)
    places = iter(range(len(items)))  # each thread takes the next one

    def work() -> None:
        scratch = Scratch()
        for i in places:
            results[i] = call(*items[i], scratch)

    with ThreadPoolExecutor(most) as threads:
        try:
            for future in as_completed([threads.submit(work) for _ in range(most)]):
                future.result()
        finally:  # after an error, or Ctrl-C, nothing is left to do
            list(places)
    return results


def per_shard(chunks: Sequence[Chunk], counts: Sequence[Array | Tensor], num_shards: int) -> Array:
    """int64 [shards]: the sums of numbers of the pieces of chunks. Waits for a device once."""
    totals: Array = np.zeros(num_shards, dtype=np.int64)
    for chunk, own in zip(chunks, memory.on_host(counts), strict=True):
        np.add.at(totals, chunk.shards, own)
    return totals


def count_live(masks: Sequence[Tensor | None], counted: Sequence[range]) -> list[int]:
    """Elements of each flat mask, among the counted ones, that compete; all if there is no mask."""
    if not [mask for mask in masks if mask is not None]:
        return list(map(len, counted))
    pieces = [
        ((mask.device, mask.dtype), (i, span.start, span.stop), True, len(span) == mask.numel())
        for i, (mask, span) in enumerate(zip(masks, counted, strict=True))
        if mask is not None
    ]
    chunks, counts, scratch = [], [], Scratch()
    for joined in join_small(pieces, SERIAL):
        operations = operations_on(masks[joined.shards[0]].device)
        for chunk in joined.cut(operations.CHUNK_BYTES // 8):
            live = operations.are_live(chunk.of(masks), scratch)
            counts.append(operations.count_pieces(live, chunk.bounds))
            chunks.append(chunk)
    totals = per_shard(chunks, counts, len(masks)).tolist()
    return [
        len(span) if mask is None else total
        for mask, span, total in zip(masks, counted, totals, strict=True)
    ]
