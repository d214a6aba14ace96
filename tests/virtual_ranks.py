"""Ranks as threads of one process: for stages that see shards and a communicator only."""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distprune.collectives import Communicator


class _Meeting:
    """Where the threads of one run exchange integers."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size


class ThreadCommunicator(Communicator):
    """Reduces over threads; also checks that all of them reduce the same shape."""

    def __init__(self, meeting: _Meeting, index: int, size: int) -> None:
        super().__init__((), range(size), index)
        self._meeting = meeting

    def _reduce(self, values, op):
        self.num_collectives += 1
        self.bytes_sent += values.numel() * values.element_size()
        self._meeting.values[self.index] = (op, values)
        self._meeting.barrier.wait(timeout=60)
        everyone = list(self._meeting.values)
        self._meeting.barrier.wait(timeout=60)
        assert len({(op, v.shape, v.dtype) for op, v in everyone}) == 1, everyone
        stacked = torch.stack([v for _, v in everyone])
        if op == dist.ReduceOp.SUM:
            return stacked.sum(0)
        return stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.amin(0)


def run_virtual_ranks(fn: Callable[[Communicator], Any], size: int) -> list[Any]:
    """Call fn(communicator) on ``size`` threads; the first error of any is raised."""
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = fn(ThreadCommunicator(meeting, index, size))
        except BaseException as error:  # raised again below
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results
