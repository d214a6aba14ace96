"""Values that are hard to rank: what they cost beside normal ones.

The twin of every data set has as many elements, in as many tensors, of normal values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import data
import torch
from contestants import RANKING, WHOLE
from masks_only import decide_only
from measuring import (
    Bound,
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    measured,
    median_ratio,
    median_seconds,
)
from one_process import check, extra_bytes
from torch import Tensor, nn

import distprune

ROUNDS = 3
NUM_ELEMENTS = 50_000_000
NUM_TINY = 1000
BOUND = 5.0
# Of values that have no order, or hardly any, on one thread.
NUM_WITHOUT_ORDER = 1 << 26
BOUND_WITHOUT_ORDER = 2.0
# What fills a weight: (weight, share of all elements that come before it, generator).
Fill = Callable[[Tensor, float, torch.Generator], None]


def all_equal(weight: Tensor, before: float, generator: torch.Generator) -> None:
    weight.fill_(data.STANDARD_DEVIATION)


def of_256_values(weight: Tensor, before: float, generator: torch.Generator) -> None:
    weight.random_(0, 256, generator=generator).sub_(128).mul_(2.0**-12)


def half_zeros(weight: Tensor, before: float, generator: torch.Generator) -> None:
    weight.normal_(0, data.STANDARD_DEVIATION, generator=generator).clamp_(min=0)


def ascending(weight: Tensor, before: float, generator: torch.Generator) -> None:
    """Over all tensors: the first are pruned as a whole, the last are kept."""
    steps = torch.arange(weight.numel(), dtype=torch.float64) / NUM_ELEMENTS
    weight.copy_(steps.add_(before).view(weight.shape))


def denormals(weight: Tensor, before: float, generator: torch.Generator) -> None:
    """Every one of them is as likely; half are negative."""
    integer = data.INTEGERS[weight.itemsize]
    smallest_normal = torch.tensor(torch.finfo(weight.dtype).tiny, dtype=weight.dtype)
    bits = weight.view(integer)
    bits.random_(1, smallest_normal.view(integer).item(), generator=generator)
    bits[: len(bits) // 2].bitwise_or_(torch.iinfo(integer).min)


def row_scales(weight: Tensor, before: float, generator: torch.Generator) -> None:
    """Rows of very different size, so that what lies near in memory is alike."""
    weight.normal_(0, data.STANDARD_DEVIATION, generator=generator)
    scales = torch.empty(len(weight), *[1] * (weight.ndim - 1)).normal_(0, 2, generator=generator)
    weight.mul_(scales.exp_().to(weight.dtype))


def tensor_scales(weight: Tensor, before: float, generator: torch.Generator) -> None:
    weight.normal_(0, 10.0 ** (6 * before - 3), generator=generator)


def one_ulp_apart(weight: Tensor, before: float, generator: torch.Generator) -> None:
    integer = data.INTEGERS[weight.itemsize]
    one = torch.ones((), dtype=weight.dtype).view(integer).item()
    weight.view(integer).random_(one, one + 2, generator=generator)


def normal(weight: Tensor, before: float, generator: torch.Generator) -> None:
    weight.normal_(0, data.STANDARD_DEVIATION, generator=generator)


@dataclass(frozen=True)
class Case:
    """One data set.

    Attributes:
        shapes: of the tensors: "model", those of a language model; "huge", one with 90 % of all
            elements and a thousand tiny ones; "one", a single tensor.
        is_half_pruned: whether half of the elements are pruned before, at random.
    """

    name: str
    fill: Fill
    amount: float = 0.5
    shapes: str = "model"
    is_half_pruned: bool = False


CASES = (
    Case("all equal", all_equal),
    Case("256 distinct values", of_256_values),
    Case("half of them zeros", half_zeros),
    Case("sorted", ascending),
    Case("half pruned before", normal, is_half_pruned=True),
    Case("denormals", denormals),
    Case("one huge tensor, 1000 tiny ones", normal, shapes="huge"),
    Case("row scales lognormal", row_scales),
    Case("row scales lognormal", row_scales, amount=0.9),
    Case("tensor scales 1e-3 to 1e3", tensor_scales),
    Case("two values, 1 ulp apart", one_ulp_apart),
)
# Ranked in another way than 32 bits are, as there are few keys.
CASES_16_BITS = tuple(
    case
    for case in CASES
    if case.name in ("all equal", "denormals", "row scales lognormal", "two values, 1 ulp apart")
    or case.is_half_pruned
)
WITHOUT_ORDER = tuple(
    replace(case, shapes="one")
    for case in CASES
    if case.name in ("all equal", "256 distinct values", "two values, 1 ulp apart")
)


def tables(options: Options) -> Iterator[Table]:
    num_elements = 200_000 if options.quick else NUM_ELEMENTS
    rounds = options.num_rounds(ROUNDS)
    for dtype, cases in ((torch.float32, CASES), (torch.bfloat16, CASES_16_BITS)):
        yield compared(dtype, cases, num_elements, rounds, BOUND)
    num_elements = 200_000 if options.quick else NUM_WITHOUT_ORDER
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        yield compared(dtype, WITHOUT_ORDER, num_elements, rounds, BOUND_WITHOUT_ORDER)
    torch.set_num_threads(num_threads)


def compared(
    dtype: torch.dtype, cases: Sequence[Case], num_elements: int, rounds: int, limit: float
) -> Table:
    rows, ratios = [], []
    for case in cases:
        hard = build(case, num_elements, dtype)
        easy = normal_twin(case, hard, num_elements)
        values = data.weights(hard)
        expected = data.oracle(values, case.amount, data.masks(hard))
        check(hard, values, expected, case.amount)
        runs = interleaved(
            {
                "hard": contestant(hard, case.amount),
                "hard, ranking": ranking_contestant(hard, case.amount),
                "normal": contestant(easy, case.amount),
                "normal, ranking": ranking_contestant(easy, case.amount),
            },
            rounds,
        )
        whole = median_ratio(runs["hard"], runs["normal"])
        ranking = median_ratio(runs["hard, ranking"], runs["normal, ranking"])
        ratios += [(whole, case, WHOLE), (ranking, case, RANKING)]
        total = data.num_elements(hard)
        extra = extra_bytes(RANKING, runs["hard, ranking"], dtype.itemsize, total)
        rows.append(
            [
                case.name,
                case.amount,
                len(values),
                expected.num_ties,
                1e3 * median_seconds(runs["hard"]),
                whole,
                1e3 * median_seconds(runs["hard, ranking"]),
                ranking,
                extra / total,
            ]
        )
    threads = torch.get_num_threads()
    text = (
        f"{num_elements / 1e6:.3g}M {str(dtype).removeprefix('torch.')}, "
        f"{threads} thread{'s' * (threads > 1)}"
    )
    worst, case, call = max(ratios, key=lambda each: each[0])
    bound = Bound(f"{text}, times normal data, worst: {case.name}, {call}", limit)
    return Table(
        f"Hard data, {text}: distprune beside normal data in as many tensors",
        [
            "",
            "amount",
            "tensors",
            "ties",
            "whole call, ms",
            "x normal",
            "ranking and masks, ms",
            "x normal",
            "extra B/element",
        ],
        rows,
        [Verdict(bound, worst)],
        [
            f"Medians of {rounds} rounds, in turn with normal data. Ties: elements that equal the "
            "threshold.",
            "Extra: the rise of the resident set while ranking, at its highest, less the masks; "
            "the most of all rounds.",
        ],
    )


def contestant(model: nn.Module, amount: float) -> Callable[[], Measurement]:
    def call() -> Measurement:
        run = measured(
            lambda: distprune.global_unstructured(
                data.pairs(model), distprune.L1Unstructured, amount=amount
            )
        )
        data.undo(model)
        return replace(run, result=None)

    return call


def ranking_contestant(model: nn.Module, amount: float) -> Callable[[], Measurement]:
    return lambda: replace(measured(lambda: decide_only(data.pairs(model), amount)), result=None)


def build(case: Case, num_elements: int, dtype: torch.dtype) -> nn.Module:
    if case.shapes == "huge":
        num_tiny = min(NUM_TINY, num_elements // 10_000)
        tiny = num_elements // 10 // num_tiny
        sizes = [num_elements - num_tiny * tiny] + [tiny] * num_tiny
        model: nn.Module = data.model_of(torch.empty(size, dtype=dtype) for size in sizes)
    elif case.shapes == "one":
        model = data.model_of([torch.empty(num_elements, dtype=dtype)])
    else:
        model = data.build(num_elements, dtype)
    generator = torch.Generator().manual_seed(1)
    total, before = data.num_elements(model), 0
    with torch.no_grad():
        for weight in model.parameters():
            case.fill(weight, before / total, generator)
            before += weight.numel()
    if case.is_half_pruned:
        for module, name in data.pairs(model):
            weight = getattr(module, name)
            keep = torch.empty(weight.shape).uniform_(generator=generator) < 0.5
            distprune.custom_from_mask(module, name, keep)
        data.remember(model)
    return model


def normal_twin(case: Case, hard: nn.Module, num_elements: int) -> nn.Module:
    """Normal values; of a model with a huge tensor, in tensors of equal size."""
    weights = data.weights(hard)
    if case.shapes == "model":
        return data.build(num_elements, weights[0].dtype)
    size = data.num_elements(hard) // len(weights)
    generator = torch.Generator().manual_seed(0)
    model = data.model_of(torch.empty(size, dtype=weights[0].dtype) for _ in weights)
    with torch.no_grad():
        for weight in model.parameters():
            normal(weight, 0.0, generator)
    return model
