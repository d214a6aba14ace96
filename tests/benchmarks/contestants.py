"""The contestants on one process: distprune, the limits of the machine, and the rivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import data
import numpy as np
import torch
import torch.nn.utils.prune as torch_prune
from masks_only import decide_only
from measuring import CheckFailed, Measurement, measured
from torch import Tensor, nn

import distprune

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

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


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
