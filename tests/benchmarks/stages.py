"""Where the time of one call goes, on one process: what to look at before anything is changed.

The stages are functions of the library, timed as they run. Threads are at work inside of ``one
read``; all other stages are on one. Processor time beside the wall time shows how much of both
cores a stage uses.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import data
import torch
from measuring import Options, Table, interleaved, measured, median_seconds, release_memory

import distprune
from distprune.selection import kernels, passes
from distprune.selection.candidates import Candidates
from distprune.selection.keys import KeyRange, Order, ScoreKeys, key_range, to_keys
from distprune.selection.scores import TensorScores
from distprune.shards.geometry import IndexMap

# What it is called in the table, and where it is looked up; later ones run inside of earlier ones.
STAGES = {
    "read the parameters, agree on them": "distprune.call.run.read_parameters",
    "count what is pruned already": "distprune.call.run.count_live_and_compare",
    "sample": "distprune.selection.bracket.sample",
    "one scan: keys, counts, drafts of the masks": "distprune.selection.kth_key.scan",
    "correct drafted masks, ties included": "distprune.selection.passes.finish_drafts",
    "write masks anew": "distprune.selection.passes.write_keep",
    "attach to the modules": "distprune.call.run.attach_masks",
}
SELECTION = "distprune.methods.ranking.select_lowest"


class Clock:
    """Wall and processor seconds of the calls of one function, in one round."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.wall = self.processor = 0.0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        wall, processor = time.perf_counter(), time.process_time()
        try:
            return self._function(*arguments, **named)
        finally:
            self.wall += time.perf_counter() - wall
            self.processor += time.process_time() - processor


def tables(options: Options) -> Iterator[Table]:
    num_elements = 1_000_000 if options.quick else 100_000_000
    rounds = options.num_rounds(3)
    for dtype in (torch.float32, torch.bfloat16):
        model = data.build(num_elements, dtype)
        yield profile(f"first pruning of {num_elements / 1e6:.0f}M {dtype}", model, rounds)
        release_memory()
    for dtype in (torch.float32, torch.bfloat16):
        yield one_read(num_elements, dtype, rounds)


def profile(title: str, model: torch.nn.Module, rounds: int) -> Table:
    """A row per stage, and one for what is between them."""
    total = data.num_elements(model)
    seen: list[dict[str, tuple[float, float]]] = []
    for _ in range(rounds + 1):
        found = one_call(model)
        data.undo(model)
        release_memory()
        seen.append(found)
    del seen[0]  # the machine hands out its memory for the first time then
    names = list(seen[0])
    rows = []
    for name in names:
        wall, processor = (statistics.median(each[name][i] for each in seen) for i in (0, 1))
        rows.append([name, wall * 1e3, wall / total * 1e9, processor / total * 1e9])
    return Table(
        f"{title}, amount 0.5: medians of {rounds} rounds",
        ["stage", "ms", "ns/element", "processor ns/element"],
        rows,
    )


def one_call(model: torch.nn.Module) -> dict[str, tuple[float, float]]:
    with ExitStack() as stack:
        clocks = {}
        for name, path in {**STAGES, "selection": SELECTION}.items():
            module, _, function = path.rpartition(".")
            clock = clocks[name] = Clock(getattr(importlib.import_module(module), function))
            stack.enter_context(mock.patch(path, clock))
        whole = Clock(distprune.global_unstructured)
        whole(data.pairs(model), distprune.L1Unstructured, amount=0.5)
    selection = clocks.pop("selection")
    inside = ("sample", "one scan: keys, counts, drafts of the masks")
    found = {name: (clock.wall, clock.processor) for name, clock in clocks.items()}
    found["the rest of the selection: histograms"] = tuple(
        value - sum(found[name][i] for name in inside)
        for i, value in enumerate((selection.wall, selection.processor))
    )
    between = tuple(
        value - sum(found[name][i] for name in found)
        for i, value in enumerate((whole.wall, whole.processor))
    )
    found["all else"] = between
    found["the whole call"] = (whole.wall, whole.processor)
    return found


def one_read(num_elements: int, dtype: torch.dtype, rounds: int) -> Table:
    """What each step of a read adds, on as many threads as the call has."""
    model = data.build(num_elements, dtype)
    keys = key_range(dtype, Order.MAGNITUDE)
    parts = [candidates(module.weight.detach().view(-1), keys) for module, _ in data.pairs(model)]
    middle = int(to_keys(torch.tensor([0.6745], dtype=dtype), keys)[0])
    # About half of a percent of the elements.
    interval = (middle, int(to_keys(torch.tensor([0.6824], dtype=dtype), keys)[0]))
    pivots = [middle - 1, interval[1]]
    warm = [torch.ones(part.num_local, dtype=dtype) for part in parts]
    flags = [torch.ones(part.num_local, dtype=torch.bool) for part in parts]
    nan = [keys.largest_number]

    def load_keys() -> list[int]:
        spans = kernels.chunks_of(parts, only_counted=True)
        calls = [partial(parts[i].keys.load, span.start, span.stop) for i, span in spans]
        num_threads = kernels.num_threads_for(parts, spans)
        return [keys.highest for keys in kernels.call_all(calls, num_threads)]

    def new() -> list[torch.Tensor]:
        return [torch.empty_like(mask) for mask in warm]

    steps: dict[str, Callable[[], Any]] = {
        "keys": load_keys,
        "keys, two counts": lambda: passes.scan(parts, pivots, None),
        "keys, two counts, keys and positions inside": lambda: passes.scan(parts, pivots, interval),
        "... with NaN looked for": lambda: passes.scan(parts, [*pivots, *nan], interval),
        "... and bool masks, warm memory": lambda: passes.scan(
            parts, [*pivots, *nan], interval, flags
        ),
        f"... and {dtype} masks, warm memory": lambda: passes.scan(
            parts, [*pivots, *nan], interval, warm
        ),
        f"... and {dtype} masks, new memory": lambda: passes.scan(
            parts, [*pivots, *nan], interval, new()
        ),
    }
    results = interleaved(
        {
            name: lambda step=step: replace(measured(step), result=None)
            for name, step in steps.items()
        },
        rounds,
    )
    total = data.num_elements(model)
    return Table(
        f"one read of {total / 1e6:.0f}M {dtype}, {torch.get_num_threads()} threads",
        ["steps", "ns/element"],
        [[name, median_seconds(runs) / total * 1e9] for name, runs in results.items()],
    )


def candidates(flat: torch.Tensor, keys: KeyRange) -> Candidates:
    size = flat.numel()
    return Candidates(
        ScoreKeys(TensorScores(flat), keys),
        None,
        IndexMap((), (), 0),
        range(size),
        size,
        size,
        flat.device,
    )
