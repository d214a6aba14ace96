"""Whole calls beside those of ``torch.nn.utils.prune``: many parameters, a large model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import many
import torch
import torch.nn.utils.prune as torch_prune
from device_clock import release, timed
from measuring import Table
from on_ranks import run_on_ranks
from stage import Stage, main
from torch import nn

import distprune

CALLS = (*many.OURS, *many.TORCH)


def many_parameters(stage: Stage) -> None:
    """Milliseconds per parameter, until the device has done everything."""
    models = (1, 10) if stage.quick else (400, many.RESNET, 10, 1)
    for wrapping in ("plain", "fsdp2"):
        rows: list[list[Any]] = []
        for model in models:
            rounds = 1 if stage.quick else 5
            (found,) = run_on_ranks(measured, 1, stage.device, wrapping, model, rounds)
            rows.append([str(model), *(found.get(call) for call in CALLS)])
            title = f"{wrapping}, one rank: ms per parameter of {many.WIDTH} x {many.WIDTH}"
            stage.table(Table(title, ["parameters", *CALLS], rows))


def measured(
    device: torch.device, wrapping: str, model: int | str, rounds: int
) -> dict[str, float]:
    found = many.measure(wrapping, model, rounds, device.type)
    return {call: statistics.median(times) for call, times in found.items()}


def large_model(stage: Stage) -> None:
    """Seconds and memory of one call on float32 weights, beside the library's."""
    rows: list[list[Any]] = []
    for billions in (1e-5,) if stage.quick else (0.1, 1.0):
        for name, prune, remove in (
            ("distprune", ours, distprune.remove),
            ("torch.nn.utils.prune", theirs, torch_prune.remove),
        ):
            release(stage.device)
            pairs = matrices(int(1e9 * billions), stage)
            first = timed(stage.device, lambda pairs=pairs, prune=prune: prune(pairs))
            times, peak = [first.seconds], first.peak_extra_bytes
            zeros = sum(int((module.weight == 0).sum()) for module, _ in pairs)
            n = sum(module.weight.numel() for module, _ in pairs)
            stage.check(f"{name}, {billions:g}B: half are zero", zeros == round(n / 2), f"{zeros}")
            for _ in range(3):
                for module, parameter in pairs:
                    remove(module, parameter)
                torch.manual_seed(1)
                with torch.no_grad():
                    for module, _ in pairs:
                        module.weight.normal_()
                again = timed(stage.device, lambda pairs=pairs, prune=prune: prune(pairs))
                times.append(again.seconds)
            title = "float32 weights in square matrices, half of them pruned"
            median = statistics.median(times[1:])
            rows.append([f"{billions:g} billion", name, times[0], median, peak / n])
            columns = ["elements", "", "first s", "median s", "peak extra B/element"]
            stage.table(Table(title, columns, rows))
            del pairs


def ours(pairs: list[tuple[nn.Module, str]]) -> None:
    distprune.global_unstructured(pairs, distprune.L1Unstructured, amount=0.5)


def theirs(pairs: list[tuple[nn.Module, str]]) -> None:
    torch_prune.global_unstructured(pairs, torch_prune.L1Unstructured, amount=0.5)


def matrices(num_elements: int, stage: Stage) -> list[tuple[nn.Module, str]]:
    width = 64 if stage.quick else 4096
    torch.manual_seed(0)
    number = max(num_elements // width**2, 1)
    with stage.device:
        layers = [nn.Linear(width, width, bias=False) for _ in range(number)]
    return [(layer, "weight") for layer in layers]


def further_calls(stage: Stage) -> None:
    """Seconds of the second call and of ``verify``, with masks in force, on the same model."""
    pairs = matrices(int(1e-5 * 1e9 if stage.quick else 1e9), stage)
    model = nn.ModuleList(module for module, _ in pairs)
    calls: dict[str, Callable[[], Any]] = {
        "first": lambda: ours(pairs),
        "second": lambda: ours(pairs),
        "verify": lambda: distprune.verify(model),
        "remove": lambda: [distprune.remove(module, name) for module, name in pairs],
    }
    for _ in range(2):
        for name, call in calls.items():
            run = timed(stage.device, call)
            stage.figure(f"{name}: seconds", run.seconds, "s")


if __name__ == "__main__":
    main(large_model, further_calls, many_parameters)
