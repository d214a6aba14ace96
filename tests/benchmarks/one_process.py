"""One process: distprune beside torch's own call, the known ways to a threshold, and the machine.

The limits are what any exact ranking has to do at the least: read every score once, and write a
mask of the scores' dtype once. Each is the fastest of several ways to do it. New memory costs as
much as the writing itself (the system hands out zeroed pages), so a limit is shown for masks in
memory that was used before, and for new ones, as a pruning call has to make them. A call that
follows another one, as in a schedule, finds memory that the first one gave back, and is compared
with the limit for such memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import data
import torch
from contestants import (
    AGAIN,
    COMPARE,
    FRESH,
    GATHER,
    RANKING,
    READ,
    TORCH,
    WARM,
    WHOLE,
    Case,
    fast_contestants,
    slow_contestants,
)
from limited_memory import address_space, available_bytes, torch_alone
from masks_only import decide_only
from measuring import (
    Bound,
    CheckFailed,
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    median_ratio,
    median_seconds,
    release_memory,
)
from torch import Tensor, nn

import distprune

ROUNDS = 3


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
        yield torch_alone([Case(20_000_000, torch.float32, 0.5, 1)], limit=address_space() + 2**28)
    else:
        large = [case for case in cases(options) if not case.slow_rounds]
        release_memory()
        yield torch_alone(large, limit=int(0.9 * available_bytes()))


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
        f"One process, {total / 1e6:.1f}M {case.dtype_name} weights in {len(values)} tensors, "
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
    where = f"{case.num_elements / 1e6:.0f}M {case.dtype_name}, amount {case.amount}"
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
