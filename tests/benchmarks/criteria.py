"""Ranking by factors, and normalised, beside ranking by magnitude: time, memory, and exact masks.

Wanda ranks |w| * norm of the input. The scores are computed in the passes over the weights, so
nothing of the size of the weights may be allocated but the masks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import data
import torch
import torch.distributed as dist
from gloo_ranks import on_gloo_ranks
from measuring import (
    Bound,
    Cell,
    CheckFailed,
    Measurement,
    Options,
    Table,
    Verdict,
    interleaved,
    measured,
    median_ratio,
    median_seconds,
)
from sharded_models import AMOUNT, check_local_masks, local, local_like, placed, shard, undo
from torch import Tensor, nn

import distprune
from distprune.call.report import PruningReport
from helpers.normalization_reference import scale_by_float64

Targets = Sequence[tuple[nn.Module, str]]
CONTESTANTS = ("magnitude", "magnitude, rms", "Wanda", "Wanda, rms", "Wanda, stored scores")


def tables(options: Options) -> Iterator[Table]:
    size = 1_000_000 if options.quick else 100_000_000
    found = on_gloo_ranks(measure, 2, size, options.num_rounds(5), timeout=1800)
    rows: list[list[Cell]] = []
    runs = {
        name: [
            Measurement(max(of_ranks)[0], 0, 0)
            for of_ranks in zip(*(each["rounds"][name] for each in found), strict=True)
        ]
        for name in CONTESTANTS
    }
    ratios, extra = {}, {}
    for name in CONTESTANTS:
        ratios[name] = median_ratio(runs[name], runs["magnitude"])
        extra[name] = max(each["bytes per local element"][name] for each in found)
        rows.append([name, median_seconds(runs[name]), ratios[name], extra[name]])
    at = f"FSDP2, 2 ranks, {size:,} elements"
    yield Table(
        f"Scores that are computed while they are ranked; {at}, float32, amount={AMOUNT}",
        ["ranked by", "seconds", "times magnitude", "extra bytes per local element"],
        rows,
        [
            Verdict(Bound(f"{at}: Wanda, times magnitude", 1.5), ratios["Wanda"]),
            Verdict(Bound(f"{at}: Wanda, extra bytes per local element", 0.4), extra["Wanda"]),
            Verdict(
                Bound(f"{at}: Wanda, rms: extra bytes per local element", 0.4), extra["Wanda, rms"]
            ),
        ],
        [
            "Everything is measured, and all masks are compared with an oracle first. Seconds: "
            "the slowest rank, medians. Extra bytes: rise of the resident set at its peak without "
            "the masks; a tensor of scores has 4.",
            "The norms of inputs are random numbers: Wanda without its calibration.",
        ],
    )


def norms_of(weights: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each input of each weight: [1, inputs], or [1] for the weights of norms."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.rand([1] * (weight.ndim - 1) + [weight.shape[-1]], generator=generator) + 0.5
        if weight.ndim > 1
        else torch.ones(1)
        for weight in weights
    ]


def measure(size: int, rounds: int) -> dict[str, Any]:
    """On every rank: check all masks, then time."""
    model = data.build(size)
    whole = data.weights(model)
    norms = norms_of(whole)
    expected: dict[str, Sequence[Tensor]] = {}
    for name, scores in _whole_scores(whole, norms):
        cut = data.oracle(scores, AMOUNT)
        masks = data.expected_masks(scores, cut)
        expected[name] = [
            torch.from_numpy(keep).view(weight.shape)
            for keep, weight in zip(masks, whole, strict=True)
        ]
    expected["Wanda, stored scores"] = expected["Wanda"]
    del whole, scores
    shard(model, "fsdp2")
    keeps = {
        name: [local_like(keep, p) for keep, (p, _) in zip(of_name, placed(model), strict=True)]
        for name, of_name in expected.items()
    }
    del expected
    targets = data.pairs(model)
    calls = _calls(targets, norms)
    left_bytes = 0
    for name, call in calls.items():
        call()
        check_local_masks(model, keeps[name])
        left_bytes = undo(model)
    num_pruned = sum(int((~keep).sum()) for keep in keeps["magnitude"])
    del keeps
    num_local = sum(local(p).numel() for p, _ in placed(model))

    def timed(call: Callable[[], PruningReport]) -> tuple[float, int]:
        dist.barrier()
        measurement = measured(lambda: call().num_pruned_now)
        if not num_pruned or not measurement.result:
            raise CheckFailed("nothing was pruned")
        undo(model)
        return measurement.seconds, measurement.peak_extra_bytes - left_bytes

    found = interleaved({name: lambda c=call: timed(c) for name, call in calls.items()}, rounds)
    peaks = {name: statistics.median(peak for _, peak in each) for name, each in found.items()}
    return {
        "rounds": {name: [each[:1] for each in several] for name, several in found.items()},
        "bytes per local element": {name: peak / num_local for name, peak in peaks.items()},
    }


def _whole_scores(
    whole: Sequence[Tensor], norms: Sequence[Tensor]
) -> Iterator[tuple[str, list[Tensor]]]:
    """The scores of each contestant, whole, one after the other."""
    yield "magnitude", list(whole)
    yield "magnitude, rms", [scale_by_float64(weight) for weight in whole]
    wanda = [weight.abs() * norm for weight, norm in zip(whole, norms, strict=True)]
    yield "Wanda", wanda
    yield "Wanda, rms", [scale_by_float64(scores) for scores in wanda]


def _calls(targets: Targets, norms: Sequence[Tensor]) -> dict[str, Callable[[], PruningReport]]:
    factored = {
        target: distprune.FactoredScores([[norm]])
        for target, norm in zip(targets, norms, strict=True)
    }

    def stored() -> PruningReport:
        scores = {}
        for (module, name), norm in zip(targets, norms, strict=True):
            weight = getattr(module, name).detach()
            part = weight.to_local()
            scores[module, name] = type(weight).from_local(
                part.abs() * norm, weight.device_mesh, weight.placements, run_check=False,
                shape=weight.shape, stride=weight.stride(),
            )  # fmt: skip
        return rank(scores, None)

    def rank(scores: Any, normalize: Any) -> PruningReport:
        return distprune.global_unstructured(
            targets, distprune.L1Unstructured, scores, amount=AMOUNT, normalize=normalize
        )

    return {
        "magnitude": lambda: rank(None, None),
        "magnitude, rms": lambda: rank(None, "rms"),
        "Wanda": lambda: rank(factored, None),
        "Wanda, rms": lambda: rank(factored, "rms"),
        "Wanda, stored scores": stored,
    }
