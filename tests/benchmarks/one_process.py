"""One process: distprune beside torch's own call, the best other way to exact masks, and a copy.

The limit is what any exact ranking has to do at the least: read every score once, and write as much
once. New memory costs as much as the writing itself (the system hands out zeroed pages), and a
pruning call has to make its masks, so the limit writes to new memory, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import data
import torch
import torch.nn.utils.prune as torch_prune
from measuring import (
    CheckFailed,
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    median_ratio,
    median_seconds,
)
from measuring import measured as measure
from torch import Tensor, nn

import distprune

WHOLE = "distprune, the whole call"
RANKING = "distprune, ranking and masks"
TORCH = "torch.nn.utils.prune, the whole call"
LIMIT = "limit: read and write once, to new memory"
COMPARE = "gather, numpy.partition of the bits, compare"


@dataclass(frozen=True)
class Case:
    """What is pruned; torch takes many times longer than ours, and fails where memory is short."""

    num_elements: int
    dtype: torch.dtype
    has_torch: bool = True
    amount: float = 0.5
    device: str = "cpu"


def cases(options: Options) -> list[Case]:
    dtypes = (torch.float32, torch.bfloat16)
    if options.quick:
        return [Case(1_000_000, dtype, device=options.device) for dtype in dtypes]
    if options.device != "cpu":  # more elements than 32 bits count, at last
        sizes = [(10**8, torch.float32), (10**8, torch.bfloat16), (10**9, torch.bfloat16)]
        largest = Case(5 * 10**9, torch.bfloat16, has_torch=False, device=options.device)
        return [*(Case(size, dtype, device=options.device) for size, dtype in sizes), largest]
    large = [Case(500_000_000, dtype, has_torch=False) for dtype in dtypes]
    return [Case(size, dtype) for size in (10**7, 10**8) for dtype in dtypes] + large


def tables(options: Options) -> Iterator[Table]:
    for case in cases(options):
        yield compared(case, options.num_rounds(3))


def compared(case: Case, rounds: int) -> Table:
    """One case: everything is checked, then all contestants run in turn."""
    model = data.build(case.num_elements, case.dtype, device=case.device)
    values = data.weights(model)
    expected = data.oracle(values, case.amount)
    total = sum(value.numel() for value in values)
    results = interleaved(contestants(model, values, expected, case), rounds)
    rows = [
        [
            name,
            1e3 * median_seconds(runs),
            1e9 * median_seconds(runs) / total,
            median_ratio(runs, results[RANKING]),
            extra_bytes(name, runs, case, total) / total,
        ]
        for name, runs in results.items()
    ]
    dtype = str(case.dtype).removeprefix("torch.")
    where = f"{case.num_elements / 1e6:.0f}M {dtype}"
    verdicts = []
    if case.num_elements == 10**8:
        faster = median_ratio(results[TORCH], results[RANKING])
        limit = rows[list(results).index(LIMIT)][3]
        verdicts = [
            Verdict(f"{where}: ranking, times faster than torch's call", faster, 60, at_least=True),
            Verdict(f"{where}: ranking, times the limit", limit, 5),
            Verdict(f"{where}: extra bytes per element", rows[1][4], 0.2),
        ]
        if case.dtype != torch.float32 or case.device != "cpu":  # there it is an aim
            verdicts = [replace(each, is_aim=True) for each in verdicts]
    return Table(
        f"One process, {total / 1e6:.1f}M {dtype} weights in {len(values)} tensors, amount "
        f"{case.amount}",
        ["", "ms", "ns/element", "x ranking", "extra B/element"],
        rows,
        verdicts,
        [
            f"Medians of {rounds} rounds, in turn; x: times the ranking's, the median of the "
            "ratios in a round.",
            "Extra: the rise of the resident set at its highest, less the results: masks, and the "
            "masked weights of a whole call. The last row prunes all ties at the threshold.",
            f"{expected.num_ties:,} elements are tied at the threshold.",
        ],
    )


def contestants(
    model: nn.Module, values: list[Tensor], expected: data.Expected, case: Case
) -> dict[str, Callable[[], Measurement]]:
    """What runs in turn; each checks its result."""
    parameters = data.pairs(model)
    num_kept = sum(value.numel() for value in values) - expected.num_pruned
    measured = partial(measure, device=case.device)

    def by(library: Any) -> Callable[[], Any]:
        return lambda: library.global_unstructured(
            parameters, library.L1Unstructured, amount=case.amount
        )

    def whole() -> Measurement:
        run = measured(by(distprune))
        data.check_report(run.result, expected)
        data.check_masks(values, data.masks(model), expected)
        data.undo(model)
        return replace(run, result=None)

    def ranking() -> Measurement:
        run = measured(lambda: distprune.global_mask(parameters, num_kept))
        data.check_masks(values, run.result.masks, expected)
        return replace(run, result=None)

    def torch_call() -> Measurement:
        run = measured(by(torch_prune))
        num_pruned = sum(int((mask == 0).sum()) for mask in data.masks(model))
        if num_pruned != expected.num_pruned:  # its ties are arbitrary
            raise CheckFailed(f"torch pruned {num_pruned:,} elements; {expected}")
        data.undo(model)
        return replace(run, result=None)

    def compare() -> Measurement:
        run = measured(lambda: partition_and_compare(values, expected.num_pruned))
        if run.result[0] != expected.threshold:
            raise CheckFailed(f"numpy.partition found {run.result[0]}; {expected}")
        return replace(run, result=None)

    def limit() -> Measurement:
        return replace(measured(lambda: [torch.abs(value) for value in values]), result=None)

    found = {WHOLE: whole, RANKING: ranking, LIMIT: limit}
    found |= {COMPARE: compare} if case.device == "cpu" else {}
    return found | ({TORCH: torch_call} if case.has_torch else {})


def extra_bytes(name: str, runs: Sequence[Measurement], case: Case, total: int) -> int:
    """The highest rise of the resident set, less what the contestant leaves on purpose."""
    left = {WHOLE: 2 * case.dtype.itemsize, TORCH: 2 * case.dtype.itemsize, RANKING: 1}
    each = left.get(name, case.dtype.itemsize)
    return max(run.peak_extra_bytes for run in runs) - each * total


def partition_and_compare(values: Sequence[Tensor], count: int) -> tuple[float, list[Tensor]]:
    """The best that one process has without this library; all ties at the threshold go."""
    flat = torch.cat([value.abs().view(-1) for value in values])
    bits = flat.clone().view(data.INTEGERS[flat.itemsize]).numpy()
    bits.partition(count - 1)
    threshold = torch.from_numpy(bits[count - 1 : count]).view(flat.dtype)
    parts = flat.split([value.numel() for value in values])
    masks = [
        torch.gt(part.view(value.shape), threshold).to(value.dtype)
        for value, part in zip(values, parts, strict=True)
    ]
    return threshold.item(), masks
