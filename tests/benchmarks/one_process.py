"""One process: distprune beside torch's own call, the known ways to a threshold, and the machine.

The limits are what any exact ranking has to do at the least: read every score once, and write a
mask of the scores' dtype once. Each is the fastest of several ways to do it. New memory costs as
much as the writing itself (the system hands out zeroed pages), so a limit is shown for masks in
memory that was used before, and for new ones, as a pruning call has to make them. A call that
follows another one, as in a schedule, finds memory that the first one gave back, and is compared
with the limit for such memory.

``python one_process.py ELEMENTS DTYPE AMOUNT BYTES`` runs torch's call alone, with that much
address space, and prints what came of it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import data
import numpy as np
import torch
import torch.nn.utils.prune as torch_prune
from measuring import (
    Bound,
    CheckFailed,
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    measured,
    median_ratio,
    median_seconds,
    release_memory,
)
from torch import Tensor, nn

import distprune
from distprune._common.process_groups import world
from distprune.call.arguments import PruningArguments
from distprune.call.context import LocalMasks, PruningCall
from distprune.call.run import prune_parameters
from distprune.methods.builtin import L1Unstructured, chosen_hook

ROUNDS = 3
WHOLE = "distprune, the whole call"
RANKING = "distprune, ranking and masks"
AGAIN = "distprune, ranking and masks, right after another call"
TORCH = "torch.nn.utils.prune, the whole call"
READ = "limit: read once"
WARM = "limit: read and write once"
FRESH = "limit: read and write once, to new memory"
GATHER = "gather |scores| into one tensor"
COMPARE = "gather, numpy.partition of the bits, compare"


@dataclass(frozen=True)
class Case:
    """What is pruned, and who takes part.

    Attributes:
        slow_rounds: rounds of what takes many times longer than ours; 0: it does not run.
        all_rivals: whether sort, topk and kthvalue run too, or torch's own call alone.
        is_judged: whether this is a case that the bounds are about.
    """

    num_elements: int
    dtype: torch.dtype
    amount: float
    slow_rounds: int
    is_judged: bool = False
    all_rivals: bool = True


def cases(options: Options) -> Iterator[Case]:
    if options.quick:
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(1_000_000, dtype, 0.5, slow_rounds=1)
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield Case(10_000_000, dtype, 0.5, slow_rounds=3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for amount in (0.1, 0.5, 0.9):
            is_judged = amount == 0.5 and dtype != torch.float16
            yield Case(100_000_000, dtype, amount, 1, is_judged=is_judged, all_rivals=amount == 0.5)
    for dtype in (torch.float32, torch.bfloat16):
        yield Case(500_000_000, dtype, 0.5, slow_rounds=0)


def tables(options: Options) -> Iterator[Table]:
    for case in cases(options):
        yield compared(case, options.num_rounds(ROUNDS))
    if options.quick:
        # Enough for Python and torch, and a model; not for what the call needs on top.
        yield torch_alone([Case(20_000_000, torch.float32, 0.5, 1)], limit=_address_space() + 2**28)
    else:
        large = [case for case in cases(options) if not case.slow_rounds]
        release_memory()
        yield torch_alone(large, limit=int(0.9 * _available_bytes()))


def compared(case: Case, rounds: int) -> Table:
    """One case: everything is checked, then all contestants run in turn."""
    model = data.build(case.num_elements, case.dtype)
    values = data.weights(model)
    expected = data.oracle(values, case.amount)
    check(model, values, expected, case.amount)
    total = data.num_elements(model)
    results = interleaved(fast_contestants(model, values, expected, case), rounds)
    if case.slow_rounds:
        slow = slow_contestants(model, values, expected, case)
        if not case.all_rivals:
            slow = {TORCH: slow[TORCH]}
        results |= interleaved(slow, min(case.slow_rounds, rounds))
        check_torch(model, expected, results[TORCH])
    results = _fastest_limits(results)
    rows, size = [], case.dtype.itemsize
    for name, runs in sorted(results.items(), key=lambda item: _rank(item[0])):
        rows.append(
            [
                name,
                len(runs),
                1e3 * median_seconds(runs),
                1e9 * median_seconds(runs) / total,
                median_ratio(runs, results[WHOLE]),
                median_ratio(runs, results[RANKING]),
                None if name == AGAIN else extra_bytes(name, runs, size, total) / total,
                None if name == AGAIN else max(run.retained_bytes for run in runs) / total,
            ]
        )
    return Table(
        f"One process, {total / 1e6:.1f}M {_name(case.dtype)} weights in {len(values)} tensors, "
        f"amount {case.amount}",
        [
            "",
            "rounds",
            "ms",
            "ns/element",
            "x whole call",
            "x ranking",
            "extra B/element",
            "left B/element",
        ],
        rows,
        list(verdicts(case, total, results)),
        [
            "Medians, the contestants in turn; x: times distprune's, median of the ratios in a "
            "round (ratio of the medians where rounds differ).",
            "Extra: the rise of the resident set at its highest, less the results; left: after the "
            "call, results included; the most of all rounds.",
            "Rows that begin with ... work on the gathered tensor and find the threshold only: the "
            "gather and the masks come on top. Those that compare prune all ties at the threshold.",
            "Results: masks, and masked weights of a whole call, of the weights' dtype. "
            f"{expected.num_ties:,} elements are tied at the threshold.",
        ],
    )


def verdicts(case: Case, total: int, results: dict[str, list[Measurement]]) -> Iterator[Verdict]:
    where = f"{case.num_elements / 1e6:.0f}M {_name(case.dtype)}, amount {case.amount}"
    ranking, size = results[RANKING], case.dtype.itemsize
    if case.is_judged:
        # What holds for float32 is aimed at for bfloat16.
        is_aim = case.dtype != torch.float32
        text = f"{where}: ranking and masks, times faster than torch's call"
        bound = Bound(text, 60, at_least=True, is_aim=is_aim)
        yield Verdict(bound, median_ratio(results[TORCH], ranking))
        for name, limit, most in (
            (RANKING, FRESH, 5),
            (RANKING, FRESH, 2),
            (AGAIN, WARM, 5),
            (AGAIN, WARM, 2),
        ):
            bound = Bound(f"{where}: {name}, times the {limit}", most)
            times = median_ratio(results[name], results[_with(results, limit)])
            yield Verdict(replace(bound, is_aim=is_aim or most == 2), times)
        for name in (WHOLE, RANKING):
            extra = extra_bytes(name, results[name], size, total) / total
            text = f"{where}: {name}: peak extra bytes per element, results aside"
            yield Verdict(Bound(text, 0.2, is_aim=is_aim), extra)
    if not case.slow_rounds:
        # Rivals' tensors are in memory too: what the call itself needs is the model and the rise.
        peak = size * total + max(run.peak_extra_bytes for run in results[WHOLE])
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        yield Verdict(Bound(f"{where}: GB of the model and the whole call", memory), peak / 1e9)


def extra_bytes(name: str, runs: Sequence[Measurement], itemsize: int, total: int) -> int:
    """The highest rise of the resident set, less what the contestant leaves on purpose."""
    most = max(run.peak_extra_bytes for run in runs)
    return most - _result_bytes(name) * itemsize * total


def check(model: nn.Module, values: list[Tensor], expected: data.Expected, amount: float) -> None:
    """Both ways into distprune give exactly the oracle's masks, on top of the present ones."""
    earlier = data.masks(model)
    report = distprune.global_unstructured(
        data.pairs(model), distprune.L1Unstructured, amount=amount
    )
    data.check_report(report, expected)
    found = data.masks(model)
    assert found is not None
    data.check_masks(values, found, expected, earlier)
    data.undo(model)
    del found
    decision = decide_only(data.pairs(model), amount)
    data.check_masks(values, decision.masks, expected, earlier)


def check_torch(model: nn.Module, expected: data.Expected, runs: Sequence[Measurement]) -> None:
    """Torch's ties are arbitrary, so its count of zeros is what there is to check."""
    for run in runs:
        if run.result != expected.num_pruned:
            raise CheckFailed(f"torch pruned {run.result:,} elements; {expected}")


class _Decided(Exception):
    def __init__(self, decision: LocalMasks) -> None:
        super().__init__()
        self.decision = decision


class _StopsWithMasks:
    """A method that ends the call when its masks are ready, before modules change."""

    def __init__(self, method: L1Unstructured) -> None:
        self._method = method
        self.READS_VALUES = method.READS_VALUES

    def decide(self, call: PruningCall) -> NoReturn:
        raise _Decided(self._method.decide(call).finish())


def decide_only(parameters: Sequence[tuple[nn.Module, str]], amount: float) -> LocalMasks:
    """The whole call without attaching: parameters are read, counted and ranked, masks made."""
    method = _StopsWithMasks(L1Unstructured(amount))
    try:
        prune_parameters(
            lambda: PruningArguments(parameters=parameters, method=method, make_hook=chosen_hook),
            world(),
        )
    except _Decided as decided:
        return decided.decision
    raise AssertionError("the call ended without asking the method to decide")


Contestant = Callable[[], Measurement]


def fast_contestants(
    model: nn.Module, values: list[Tensor], expected: data.Expected, case: Case
) -> dict[str, Contestant]:
    """Ours, the limits, and the fastest exact rival; they run in all rounds."""
    parameters = data.pairs(model)

    def whole() -> Measurement:
        run = measured(
            lambda: distprune.global_unstructured(
                parameters, distprune.L1Unstructured, amount=case.amount
            )
        )
        data.undo(model)
        return replace(run, result=None)

    def again() -> Measurement:
        decide_only(parameters, case.amount)
        run = measured(lambda: decide_only(parameters, case.amount), release=False)
        return replace(run, result=None)

    def compare() -> Measurement:
        run = measured(lambda: _partition_and_compare(values, expected.num_pruned))
        if run.result[0] != expected.threshold:
            raise CheckFailed(f"numpy.partition found {run.result[0]}; {expected}")
        return replace(run, result=None)

    return {
        WHOLE: whole,
        RANKING: lambda: replace(
            measured(lambda: decide_only(parameters, case.amount)), result=None
        ),
        AGAIN: again,
        **limits(values),
        COMPARE: compare,
    }


def limits(values: list[Tensor]) -> dict[str, Contestant]:
    """Several ways to read once, and to read and write once; only the fastest of each counts."""
    warm = [torch.ones_like(value) for value in values]
    words = [value.view(-1).view(torch.int64) for value in values]
    # One contiguous share of all elements per thread.
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    shares = [_shares(value, threads) for value in words]
    warm_shares = [_shares(mask.view(-1).view(torch.int64), threads) for mask in warm]

    def on_threads(work: Callable[[int], Any]) -> None:
        list(pool.map(work, range(threads)))

    def numpy_read(which: int) -> None:
        for parts in shares:
            np.bitwise_or.reduce(parts[which])

    def numpy_write(which: int) -> None:
        for parts, masks in zip(shares, warm_shares, strict=True):
            np.bitwise_and(parts[which], 1, out=masks[which])

    def numpy_memory() -> list[Tensor]:
        """Of numpy, which asks for huge pages where the system has them on request."""
        integer = data.INTEGERS[values[0].itemsize]
        names = str(integer).removeprefix("torch.")
        found = [torch.from_numpy(np.empty(tuple(value.shape), names)) for value in values]
        return [mask.view(values[0].dtype) for mask in found]

    def write_to(masks: list[Tensor]) -> list[Tensor]:
        for value, mask in zip(values, masks, strict=True):
            torch.abs(value, out=mask)
        return masks

    ways: dict[str, Callable[[], Any]] = {
        f"{READ} (torch.sum)": lambda: [torch.sum(value) for value in values],
        f"{READ} (torch.sum of int64 words)": lambda: [torch.sum(word) for word in words],
        f"{READ} (numpy, threads)": lambda: on_threads(numpy_read),
        f"{WARM} (torch.abs)": lambda: write_to(warm),
        f"{WARM} (numpy, threads)": lambda: on_threads(numpy_write),
        f"{FRESH} (torch.abs)": lambda: [torch.abs(value) for value in values],
        f"{FRESH} (torch.abs, numpy's memory)": lambda: write_to(numpy_memory()),
    }
    for way in ways.values():
        way()
    return {name: lambda way=way: replace(measured(way), result=None) for name, way in ways.items()}


def _shares(words: Tensor, threads: int) -> list[np.ndarray]:
    return [part.numpy() for part in torch.tensor_split(words, threads)]


def slow_contestants(
    model: nn.Module, values: list[Tensor], expected: data.Expected, case: Case
) -> dict[str, Contestant]:
    """Torch's call, and its ways to a threshold: 10 to 200 ns per element."""
    count = expected.num_pruned
    parameters = data.pairs(model)

    def torch_call() -> Measurement:
        run = measured(
            lambda: torch_prune.global_unstructured(
                parameters, torch_prune.L1Unstructured, amount=case.amount
            )
        )
        masks = data.masks(model)
        assert masks is not None
        num_zeros = sum(mask.numel() - int(torch.count_nonzero(mask)) for mask in masks)
        data.undo(model)
        return replace(run, result=num_zeros)

    def threshold(find: Callable[[Tensor], Tensor]) -> Contestant:
        def contestant() -> Measurement:
            gathered = gather(values)
            run = measured(lambda: find(gathered))
            if run.result.item() != expected.threshold:
                raise CheckFailed(f"a threshold of {run.result.item()}; expected {expected}")
            return replace(run, result=None)

        return contestant

    return {
        TORCH: torch_call,
        GATHER: lambda: replace(measured(lambda: gather(values)), result=None),
        "... numpy.partition of the bits": threshold(lambda flat: _partition(flat, count)),
        "... torch.kthvalue": threshold(lambda flat: torch.kthvalue(flat, count).values),
        "... torch.topk, unsorted": threshold(
            lambda flat: torch.topk(flat, count, largest=False, sorted=False).values.max()
        ),
        "... torch.topk": threshold(
            lambda flat: torch.topk(flat, count, largest=False).values[-1].clone()
        ),
        "... torch.sort": threshold(lambda flat: torch.sort(flat).values[count - 1].clone()),
    }


def gather(values: Sequence[Tensor]) -> Tensor:
    """All magnitudes in one flat tensor, written straight to where they belong."""
    flat = values[0].new_empty(sum(value.numel() for value in values))
    for value, part in zip(values, flat.split([v.numel() for v in values]), strict=True):
        torch.abs(value, out=part.view(value.shape))
    return flat


def _partition(flat: Tensor, count: int) -> Tensor:
    """The threshold; reorders ``flat``."""
    bits = flat.view(data.INTEGERS[flat.itemsize]).numpy()
    bits.partition(count - 1)
    return flat[count - 1].clone()


def _partition_and_compare(values: Sequence[Tensor], count: int) -> tuple[float, list[Tensor]]:
    """The best that one process has without this library; all ties at the threshold go."""
    flat = gather(values)
    threshold = _partition(flat.clone(), count)
    found = []
    for value, part in zip(values, flat.split([v.numel() for v in values]), strict=True):
        mask = torch.empty_like(value)
        torch.gt(part.view(value.shape), threshold, out=mask)
        found.append(mask)
    return threshold.item(), found


def _fastest_limits(results: dict[str, list[Measurement]]) -> dict[str, list[Measurement]]:
    """Without the slower ways to the same limit."""
    kept = {name: runs for name, runs in results.items() if not name.startswith("limit")}
    for limit in (READ, WARM, FRESH):
        ways = [name for name in results if name.startswith(limit + " (")]
        best = min(ways, key=lambda name: median_seconds(results[name]))
        kept[best] = results[best]
    return kept


def _with(results: dict[str, Any], start: str) -> str:
    return next(name for name in results if name.startswith(start + " ("))


def _rank(name: str) -> int:
    order = (WHOLE, RANKING, AGAIN, TORCH, READ, WARM, FRESH, COMPARE, GATHER)
    return next((i for i, start in enumerate(order) if name.startswith(start)), len(order))


def _result_bytes(name: str) -> int:
    """What a contestant leaves on purpose, in units of a weight: masks, and masked weights."""
    if name in (WHOLE, TORCH):
        return 2
    return int(name in (RANKING, AGAIN, COMPARE) or name.startswith(FRESH))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_alone(large: Sequence[Case], limit: int) -> Table:
    """Torch's call in a process that may not take more than ``limit`` bytes of address space."""
    rows = []
    for case in large:
        arguments = [case.num_elements, _name(case.dtype), case.amount, limit]
        run = subprocess.run(
            [sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True
        )
        rows.append([f"{case.num_elements / 1e6:.0f}M {_name(case.dtype)}", *_outcome(run)])
    return Table(
        f"torch.nn.utils.prune in a process of its own, with {limit / 1e9:.1f} GB of address space",
        ["", "seconds", "extra B/element", "outcome"],
        rows,
    )


def _outcome(run: subprocess.CompletedProcess) -> list[Any]:
    if run.returncode == 0:
        found = json.loads(run.stdout.splitlines()[-1])
        return [found["seconds"], found["peak extra"], "done"]
    lines = run.stderr.strip().splitlines() or ["nothing on stderr"]
    why = next((line for line in lines if "bad_alloc" in line), lines[-1])
    status = f"exit status {run.returncode}"
    if run.returncode < 0:
        status = signal.Signals(-run.returncode).name
    return [None, None, f"failed with {status}: {_brief(why)}"]


def _brief(message: str) -> str:
    """The sentence about memory, if there is one, without where in torch's code that was."""
    start = max(message.find("DefaultCPUAllocator"), 0)
    return message[start:].partition(". Error code")[0].strip()[:100]


def run_torch_alone(num_elements: int, dtype: torch.dtype, amount: float, limit: int) -> None:
    """In the child: torch's call under a limit, so that it fails and not the machine."""

    def prune(model: nn.Module) -> None:
        torch_prune.global_unstructured(
            data.pairs(model), torch_prune.L1Unstructured, amount=amount
        )

    prune(data.build(100_000, dtype))  # whatever it imports or starts is there then
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    Path("/proc/self/oom_score_adj").write_text("1000")
    model = data.build(num_elements, dtype)
    total = data.num_elements(model)
    run = measured(lambda: prune(model))
    masks = data.masks(model)
    assert masks is not None
    data.check_count(masks, round(amount * total))
    extra = run.peak_extra_bytes / total - 2 * dtype.itemsize
    print(json.dumps({"seconds": run.seconds, "peak extra": extra}))


def _address_space() -> int:
    """Of this process now, in bytes; most of it is libraries."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _available_bytes() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(text.split("MemAvailable:")[1].split()[0]) * 1024


if __name__ == "__main__":
    _elements, _dtype, _amount, _limit = sys.argv[1:]
    run_torch_alone(int(_elements), getattr(torch, _dtype), float(_amount), int(_limit))
