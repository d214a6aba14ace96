"""Bytes that the reading pass of a device moves, by torch's operations and by Triton's kernels.

Counted, on a CPU: what each operation of torch reads and writes, and what each load and store of
the interpreted kernels touches. That is the least that a device moves: neither caches nor what an
operation does inside of itself are counted.

    python tests/benchmarks/device_traffic.py                   the counts, as JSON
    python tests/benchmarks/device_traffic.py --time cuda       times of both, and of a copy
    python tests/benchmarks/device_traffic.py --time cpu --elements 20000    a rehearsal
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distprune._common import memory
from distprune._common.memory import on_host
from distprune.selection import kernels, passes
from distprune.selection.candidates import Candidates, Cut
from distprune.selection.keys import Order, ScoreKeys, key_range
from distprune.selection.scores import TensorScores
from distprune.shards.geometry import IndexMap

DTYPES = ("float32", "bfloat16")
# Operations that read only the elements that they are asked for.
_GATHERS = ("aten::index", "aten::index_select")
# As wide as the bracket of ten billion elements, about.
_SHARE = 0.00125


class Traffic(TorchDispatchMode):
    """Adds up the bytes of what operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        arguments = list(zip(schema.arguments, args, strict=False))
        arguments += [(each, (kwargs or {}).get(each.name)) for each in schema.arguments]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        read: list[Tensor] = []
        for argument, value in {id(v): (a, v) for a, v in arguments}.values():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if not (argument.is_out and tensors):
                read += tensors
        if schema.name in _GATHERS:
            read = [*written, *read[1:]]
        memories = {tensor.untyped_storage().data_ptr() for tensor in read}
        is_view = not schema.is_mutable and any(
            tensor.numel() and tensor.untyped_storage().data_ptr() in memories for tensor in written
        )
        if not is_view:
            self.num_bytes += sum(tensor.numel() * tensor.itemsize for tensor in [*read, *written])
        return result


@contextlib.contextmanager
def count_interpreted() -> Iterator[list[int]]:
    """Bytes of every load and store of interpreted kernels, one by one."""
    from triton.runtime.interpreter import InterpreterBuilder

    sizes: list[int] = []
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers: Any, mask: Any) -> None:
        sizes.append(int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8)

    def counted_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return load(self, pointers, mask, *others)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return store(self, pointers, value, mask, *others)

    with mock.patch.multiple(
        InterpreterBuilder, create_masked_load=counted_load, create_masked_store=counted_store
    ):
        yield sizes


class Pass:
    """One reading pass over normal weights in several tensors, and the correction of its drafts."""

    def __init__(
        self, dtype: torch.dtype, num_elements: int, device: torch.device, *, is_pruned: bool
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        size = num_elements // 4
        numbers = key_range(dtype, Order.MAGNITUDE)
        self.parts, self.drafts = [], []
        for _ in range(4):
            scores = torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)
            live = None
            if is_pruned:
                live = torch.rand(size, generator=generator, device=device) > 0.2
            index = IndexMap((range(size),), (1,), 0)
            keys = ScoreKeys(TensorScores(scores), numbers)
            self.parts.append(Candidates(keys, live, index, range(size), size, size, device))
            self.drafts.append(torch.empty(size, dtype=torch.bool, device=device))
        near = (0.6745 * (1 - 2 * _SHARE), 0.6745 * (1 + 2 * _SHARE))  # the median of |x|
        both = ScoreKeys(TensorScores(torch.tensor(near, dtype=dtype)), numbers).load(0, 2)
        self.low, self.high = map(int, both.values)
        self.pivots = [self.low - 1, self.high, numbers.largest_number]
        found = self.parts[0].keys.load(0, size).values
        # A sample tells it; of 16 bits, one key may have many times more elements than another.
        self.share = float(((found >= self.low) & (found <= self.high)).float().mean())

    def run(self) -> list[int]:
        scanned = passes.scan(
            self.parts, self.pivots, (self.low, self.high), self.drafts, self.share
        )
        cut = Cut((self.low + self.high) // 2, len(self.parts), 0)
        counts = passes.finish_drafts(scanned, self.parts, cut, self.drafts)
        return on_host([count for count in counts if count is not None])


def counted(dtype: torch.dtype, *, is_pruned: bool) -> tuple[float, float]:
    """Bytes per element: torch's operations, Triton's kernels."""
    from distprune.selection import triton_kernels, triton_tables

    with mock.patch.object(memory, "takes_numpy", lambda device: False):
        work = Pass(dtype, 1 << 17, torch.device("cpu"), is_pruned=is_pruned)
    n = sum(part.num_local for part in work.parts)
    with (
        mock.patch.object(memory, "takes_numpy", lambda device: False),
        mock.patch.object(kernels, "fused_on", lambda device: None),
        Traffic() as traffic,
    ):
        expected = work.run()
    with (
        mock.patch.object(kernels, "fused_on", lambda device: triton_kernels),
        # Of several blocks, as those of large parameters: what is read once for a tile is little.
        mock.patch.object(triton_tables, "_NUM_TILES", 16),
        count_interpreted() as sizes,
    ):
        assert work.run() == expected
    return traffic.num_bytes / n, sum(sizes) / n


def count_all() -> dict[str, tuple[float, float]]:
    """By dtype, and "pruned" after it where a bool mask is in force: torch, Triton."""
    return {
        dtype + (" pruned" if is_pruned else ""): counted(
            getattr(torch, dtype), is_pruned=is_pruned
        )
        for dtype in DTYPES
        for is_pruned in (False, True)
    }


def timed(
    dtype: torch.dtype, num_elements: int, device: torch.device, rounds: int = 10
) -> dict[str, Any]:
    """Median seconds of the reading pass, of each form in turn, and of a copy of the scores.

    Returns:
        "torch", "fused" (None where there are no fused kernels) and "copy": seconds; "bytes": what
        has to move, each score and one byte of mask; "copied": what the copy moves; "masks_agree".
    """
    work = Pass(dtype, num_elements, device, is_pruned=False)
    scores = torch.empty(num_elements, dtype=dtype, device=device).normal_()
    copied = torch.empty_like(scores)
    fused = kernels.fused_on(device)
    forms: dict[str, Callable[[], Any]] = {
        "torch": lambda: _with(None, work.run),
        "copy": lambda: copied.copy_(scores),
    }
    if fused is not None:
        forms["fused"] = lambda: _with(fused, work.run)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    masks: dict[str, Sequence[Tensor]] = {}
    for name, form in forms.items():  # compiles, and takes memory
        form()
        masks[name] = [draft.clone() for draft in work.drafts]
    for _ in range(rounds):
        for name, form in forms.items():
            _synchronize(device)
            started = time.perf_counter()
            form()
            _synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    same = all(
        torch.equal(one, other)
        for one, other in zip(masks["torch"], masks.get("fused", masks["torch"]), strict=True)
    )
    return {
        "dtype": str(dtype), "elements": num_elements, "device": str(device), "fused": None,
        **{name: statistics.median(each) for name, each in seconds.items()},
        "bytes": num_elements * (dtype.itemsize + 1), "copied": 2 * num_elements * dtype.itemsize,
        "masks_agree": same,
    }  # fmt: skip


def _with(fused: kernels.FusedKernels | None, run: Callable[[], Any]) -> Any:
    with mock.patch.object(kernels, "fused_on", lambda device: fused):
        return run()


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", metavar="DEVICE")
    parser.add_argument("--elements", type=int, default=1 << 30)
    given = parser.parse_args()
    if given.time is None:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        print(json.dumps(count_all()))
        return
    for dtype in DTYPES:
        print(json.dumps(timed(getattr(torch, dtype), given.elements, torch.device(given.time))))


if __name__ == "__main__":
    main()
