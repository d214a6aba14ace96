"""The passes over this rank's shards: chunk by chunk, so that scratch memory stays small.

A chunk is a run of one shard, or several small shards of one kind side by side, because each
operation costs microseconds however few elements there are::

    keys       | 0 0 0 0 | 1 1 | 2 2 2 2 2 2 |      one array, compared once
    bounds     0         4     6             12     where the pieces begin and end
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.memory import SERIAL, Array, Count, Scratch, on_host
from distprune.ranking import cpu, device
from distprune.ranking.scores import KeySource
from distprune.shards.geometry import IndexMap

# With smaller chunks, threads would wait for each other more than they work.
_THREADED_CHUNK = 1 << 19  # bytes
# More threads than this spend their time on waiting for the interpreter's lock.
_MAX_THREADS = 8

R = TypeVar("R")
# bool, one for each element: an array on a CPU, a tensor on other devices.
Flags = Any


class Elements(Protocol):
    """What a ranking needs to know of a shard; shards of live models have it."""

    @property
    def name(self) -> str:
        """Of the parameter, for messages."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""

    @property
    def index(self) -> IndexMap:
        """From flat positions to global indices."""

    @property
    def counted(self) -> range:
        """The flat positions that this rank counts; each rank of a replica counts some."""

    @property
    def flat_mask(self) -> Tensor | None:
        """The mask in force; elements that are 1 compete. None: all do."""


@dataclass(frozen=True)
class Part:
    """Elements that no model has: of a file, or of one plain tensor."""

    name: str
    numel: int
    index: IndexMap
    counted: range
    flat_mask: Tensor | None = None


@dataclass(frozen=True)
class Chunk:
    """Some pieces of shards of one kind.

    Attributes:
        pieces: (number of the shard, start, stop) of each, in flat positions.
        is_counted: whether this rank counts the elements, all of them or none.
    """

    pieces: list[tuple[int, int, int]]
    is_counted: bool

    @cached_property
    def bounds(self) -> list[int]:
        """Where the pieces begin and end: one number more than pieces."""
        ends = [0]
        for _, start, stop in self.pieces:
            ends.append(ends[-1] + stop - start)
        return ends

    @cached_property
    def shards(self) -> list[int]:
        """The numbers of the shards."""
        return [number for number, _, _ in self.pieces]

    def each(self, of_shards: Sequence[int] | Mapping[int, int], dtype: np.dtype) -> int | Array:
        """A number of each shard, as one number if all are equal, else per element."""
        if len(self.pieces) == 1:
            return of_shards[self.pieces[0][0]]
        numbers = [of_shards[number] for number in self.shards]
        if len(set(numbers)) == 1:
            return numbers[0]
        return np.repeat(np.array(numbers, dtype), np.diff(self.bounds))


def operations_on(where: torch.device) -> ModuleType:
    """The functions that touch every element: numpy's on a CPU, torch's operations elsewhere."""
    return cpu if memory.takes_numpy(where) else device


def chunks_of(
    shards: Sequence[Elements],
    sources: Sequence[KeySource],
    numbers: Iterable[int],
    outs: Sequence[Tensor] | None = None,
    *,
    only_counted: bool,
) -> list[Chunk]:
    """Cut some shards into chunks.

    Args:
        shards, sources: of this rank.
        numbers: of the shards to visit.
        outs: masks to write, if any: pieces of a chunk have one dtype.
        only_counted: leave out what other ranks count.
    """
    chunks = []
    joined: dict[object, list[tuple[int, int, int]]] = {}
    sizes: dict[object, int] = {}
    for number in numbers:
        shard, source = shards[number], sources[number]
        counted, size, live = shard.counted, source.size, shard.flat_mask
        spans = [(counted.start, counted.stop, True)]
        if not only_counted and len(counted) < size:
            spans += [(0, counted.start, False), (counted.stop, size, False)]
        most = operations_on(source.device).CHUNK_BYTES // source.dtype.itemsize
        for start, stop, is_counted in spans:
            if stop - start > SERIAL:
                for span in spans_of(range(start, stop), most):
                    chunks.append(Chunk([(number, span.start, span.stop)], is_counted))
            elif stop > start:
                kind = (
                    source.device, type(source), getattr(source, "scores", source).dtype,
                    None if live is None else live.dtype,
                    None if outs is None else outs[number].dtype, is_counted,
                )  # fmt: skip
                if kind in joined and sizes[kind] + stop - start > most:
                    chunks.append(Chunk(joined.pop(kind), is_counted))
                    sizes[kind] = 0
                joined.setdefault(kind, []).append((number, start, stop))
                sizes[kind] = sizes.get(kind, 0) + stop - start
    return chunks + [Chunk(pieces, kind[-1]) for kind, pieces in joined.items()]  # type: ignore[index]


def spans_of(positions: range, most: int) -> Iterator[range]:
    """Cut a range into ranges of about equal size, of at most ``most`` positions."""
    # Of equal size: each costs some calls, however small it is.
    size = max(1, -(-len(positions) // max(1, -(-len(positions) // max(1, most)))))
    for start in range(positions.start, positions.stop, size):
        yield range(start, min(start + size, positions.stop))


def joined_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Flat tensors one after the other; one of them is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def pieces_in(chunk: Chunk, flat: Sequence[Tensor | None]) -> list[Tensor]:
    """The pieces of flat tensors, one per shard of the rank."""
    found = []
    for number, start, stop in chunk.pieces:
        tensor = flat[number]
        assert tensor is not None
        found.append(tensor if stop - start == tensor.numel() else tensor[start:stop])
    return found


def visit(
    chunks: Sequence[Chunk],
    sources: Sequence[KeySource],
    call: Callable[[Chunk, Scratch], R],
) -> list[R]:
    """Call a function for each chunk, on several threads where that is safe and worth it."""
    used = {number for chunk in chunks for number in chunk.shards}
    num_bytes = sum(chunk.bounds[-1] * sources[chunk.shards[0]].dtype.itemsize for chunk in chunks)
    on_threads = all(
        sources[n].is_thread_safe and memory.takes_numpy(sources[n].device) for n in used
    )
    threads = num_threads(num_bytes, len(chunks)) if on_threads else 1
    return call_all([partial(call, chunk) for chunk in chunks], threads)


def num_threads(num_bytes: int, num_chunks: int) -> int:
    """As many as torch would use, if chunks are large enough."""
    if num_bytes < _THREADED_CHUNK * num_chunks:
        return 1
    return max(1, min(torch.get_num_threads(), _MAX_THREADS, num_chunks))


def call_all(calls: Sequence[Callable[[Scratch], R]], num_threads: int) -> list[R]:
    """Call all with a thread's scratch memory; results in the order of the calls."""
    if num_threads == 1:
        scratch = Scratch()
        return [call(scratch) for call in calls]
    results: dict[int, R] = {}
    errors: list[BaseException] = []
    # One iterator for all: a thread takes the next call when it has time.
    todo = iter(enumerate(calls))

    def work() -> None:
        scratch = Scratch()
        try:
            for i, call in todo:
                results[i] = call(scratch)
                if errors:
                    return
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=work) for _ in range(num_threads - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(calls))]


def count_live(masks: Sequence[Tensor | None], counted: Sequence[range]) -> list[int]:
    """Elements of each flat mask, among the counted ones, that compete; all if there is no mask."""
    scratch = Scratch()
    counts: list[list[Count]] = []
    for mask, positions in zip(masks, counted, strict=True):
        counts.append([len(positions)] if mask is None else [])
        if mask is not None:
            operations = operations_on(mask.device)
            for span in spans_of(positions, operations.CHUNK_BYTES // mask.itemsize):
                live = operations.are_live(mask[span.start : span.stop], scratch)
                counts[-1] += operations.count_pieces(live, [0, len(span)])
    numbers = iter(on_host([count for of_mask in counts for count in of_mask]))
    return [sum(next(numbers) for _ in of_mask) for of_mask in counts]
