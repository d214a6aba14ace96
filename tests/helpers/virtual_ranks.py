"""Ranks as threads of one process, for code that needs only shards and a communicator."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distprune.ranking.chunks import Part
from distprune.ranking.scores import ScoreSource
from distprune.ranks.collectives import Communicator
from distprune.shards.geometry import dim_coordinates, index_map, run_index_map
from distprune.shards.shard import Shard


class _Stopped(Exception):
    """Another rank has failed."""


class _Turns:
    """Threads that take turns: each runs until it waits for a reduction; then the next one runs.

    So a thousand threads cost no more than their work, runs are deterministic, and a rank that
    returns while others wait is detected at once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.has_failed = False
        self._may_run = [threading.Semaphore(int(index == 0)) for index in range(size)]
        self._is_done = [False] * size
        self._num_sums = [0] * size
        self._given: dict[int, tuple[Any, Tensor]] = {}
        self._reduced: tuple[int, Tensor] | None = None

    def exchange(self, index: int, op: Any, values: Tensor) -> Tensor:
        which = self._num_sums[index]
        self._num_sums[index] += 1
        self._given[index] = op, values
        self._let_next_run(index)
        self.wait(index)
        if self._reduced is None or self._reduced[0] != which:  # the first one to come back
            self._reduced = which, self._reduce()
        return self._reduced[1].clone()

    def wait(self, index: int) -> None:
        self._may_run[index].acquire()
        if self.has_failed:
            raise _Stopped

    def leave(self, index: int) -> None:
        self._is_done[index] = True
        self._let_next_run(index)

    def _let_next_run(self, index: int) -> None:
        following = (*range(index + 1, self.size), *range(index + 1))
        chosen = next((other for other in following if not self._is_done[other]), None)
        if chosen is not None:
            self._may_run[chosen].release()

    def _reduce(self) -> Tensor:
        given, self._given = self._given, {}
        assert len(given) == self.size, f"only ranks {sorted(given)} reduce"
        kinds = {(op, values.shape, values.dtype) for op, values in given.values()}
        assert len(kinds) == 1, f"the ranks reduce different things: {kinds}"
        (op, _, _) = kinds.pop()
        stacked = torch.stack([values for _, values in given.values()])
        if op == "sum":
            return stacked.sum(0)
        return stacked.amax(0) if op == "max" else stacked.amin(0)


class ThreadCommunicator(Communicator):
    """Reduces over threads, and checks that all of them reduce the same shape."""

    def __init__(self, turns: _Turns, index: int) -> None:
        super().__init__((), range(turns.size), index)
        self._turns = turns

    def _reduce(self, values, op):
        self.num_collectives += 1
        self.bytes_sent += values.numel() * values.element_size()
        return self._turns.exchange(self.index, op, values)


def run_virtual_ranks(fn: Callable[[Communicator], Any], size: int) -> list[Any]:
    """Call fn(communicator) on ``size`` threads; the first error of any is raised."""
    turns = _Turns(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            turns.wait(index)
            results[index] = fn(ThreadCommunicator(turns, index))
        except _Stopped:
            pass
        except BaseException as error:  # raised again below
            errors.append(error)
            turns.has_failed = True
        finally:
            turns.leave(index)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# Tensors cut into shards.


def layout(kind: str, shape: tuple[int, ...], size: int, rank: int):
    """(splits, replica, number of replicas) of a rank; splits is None if it holds nothing."""
    half = size // 2
    match kind:
        case "rows":
            return [(0, size, rank)], 0, 1
        case "columns":
            return [(len(shape) - 1, size, rank)], 0, 1
        case "replicated":
            return [], rank, size
        case "owned by the last":
            return [(0, 1, 0)] if rank == size - 1 else None, 0, 1
        case "strided" if size % 2 == 0:
            # FSDP2 over 2 tensor parallel ranks: rows cut by tp, then by dp.
            return [(0, 2, rank % 2), (0, half, rank // 2)], 0, 1
        case "hybrid" if size % 2 == 0:
            return [(0, 2, rank % 2)], rank // 2, half
        case "grid" if size % 2 == 0:
            last = len(shape) - 1
            return [(0, 2, rank % 2), (last, half, rank // 2)], 0, 1
    return [(0, size, rank)], 0, 1


LAYOUTS = ("rows", "columns", "replicated", "owned by the last", "strided", "hybrid", "grid")


def part_of(whole, live, kind, common, size, rank, name="tensor"):
    """This rank's part of a tensor, its keys, and a function that cuts it out of a mask."""
    cut = layout(kind, whole.shape, size, rank)
    splits, replica, num_replicas = cut if cut[0] is not None else ([], 0, 1)
    coordinates = dim_coordinates(whole.shape, splits)
    if cut[0] is None:
        coordinates = tuple(rows[:0] for rows in coordinates)

    def local(tensor):
        for dim, rows in enumerate(coordinates):
            tensor = tensor.narrow(dim, rows.start, len(rows))
        return tensor.reshape(-1)

    flat = local(whole)
    n = flat.numel()
    index = index_map(whole.shape, coordinates, range(whole.ndim))
    counted = range(n * replica // num_replicas, n * (replica + 1) // num_replicas)
    mask = None if live is None else local(live)
    return (Part(name, whole.numel(), index, counted, mask), ScoreSource(flat), local)


def shards_of(values, memory_dims, generator):
    """Parts of a tensor as wrappers cut it: chunks of dimensions, and runs of its memory."""
    shape = values.shape
    splits = [
        (dim, chunks, generator.randrange(chunks))
        for dim in range(len(shape))
        for chunks in [generator.choice([1, 1, 2, 3])]
    ]
    coordinates = dim_coordinates(shape, splits)
    part = values
    for dim, rows in enumerate(coordinates):
        part = part.narrow(dim, rows.start, len(rows))
    inverse = [memory_dims.index(dim) for dim in range(len(shape))]
    part = part.permute(memory_dims).contiguous().permute(inverse)
    index = index_map(shape, coordinates, memory_dims)
    yield Shard("w", values, part, None, shape, index)
    in_memory = values.permute(memory_dims).contiguous()
    stride = in_memory.permute(inverse).stride()
    first = generator.randrange(values.numel())
    last = generator.randrange(first, values.numel() + 1)
    run = in_memory.reshape(-1)[first:last]
    yield Shard("w", values, run, None, shape, run_index_map(shape, stride, first), is_run=True)
