"""Pruning again and again: what a step costs, and whether anything is left behind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import data
import torch
from measuring import Bound, Options, Table, Verdict, measured, release_memory, resident_bytes
from torch import nn

import distprune
from distprune.schedule import Cubic, ScheduledPruner

NUM_ELEMENTS = 20_000_000
NUM_STEPS = 100
FINAL_SPARSITY = 0.9
GROWTH_FROM = 10
GROWTH = 0.01
# (model, schedule) -> what prunes at a step
Pruner = Callable[[nn.Module, Cubic], Callable[[int], object]]


def scheduled(model: nn.Module, schedule: Cubic) -> Callable[[int], object]:
    pruner = ScheduledPruner(data.pairs(model), schedule)
    pruner.step()  # that of step 0, where nothing is due yet
    return lambda step: pruner.step()


def plain(model: nn.Module, schedule: Cubic) -> Callable[[int], object]:
    total = data.num_elements(model)

    def prune(step: int) -> object:
        return distprune.global_unstructured(
            data.pairs(model), distprune.L1Unstructured, amount=count_at(schedule, step, total)
        )

    return prune


PRUNERS: dict[str, Pruner] = {"ScheduledPruner.step()": scheduled, "global_unstructured": plain}


def count_at(schedule: Cubic, step: int, total: int) -> int:
    """Elements that are newly pruned at a step."""
    now, before = (round(schedule.sparsity_at(s) * total) for s in (step, step - 1))
    return now - before


def tables(options: Options) -> Iterator[Table]:
    num_elements = 300_000 if options.quick else NUM_ELEMENTS
    num_steps = GROWTH_FROM + 2 if options.quick else NUM_STEPS
    schedule = Cubic(begin=0, end=num_steps, frequency=1, final_sparsity=FINAL_SPARSITY)
    rows, verdicts = [], []
    for name, make in PRUNERS.items():
        check(make, schedule, num_elements)
        seconds, resident = followed(make, schedule, num_elements)
        total, peak, retained = memory_of_a_step(make, schedule, num_elements)
        growth = (resident[num_steps] - resident[GROWTH_FROM]) / (4 * total)
        rows.append(
            [
                name,
                1e3 * seconds[0],
                1e3 * statistics.median(seconds),
                1e3 * seconds[-1],
                1e9 * statistics.median(seconds) / total,
                100 * growth,
                peak / total,
                retained / total,
            ]
        )
        text = f"{name}: growth from step {GROWTH_FROM} to {num_steps}, share of the model"
        verdicts.append(Verdict(Bound(text, GROWTH), growth))
    yield Table(
        f"A cubic schedule to {FINAL_SPARSITY} in {num_steps} prunings of {total / 1e6:.1f}M "
        "float32 weights",
        [
            "",
            "first, ms",
            "median, ms",
            "last, ms",
            "ns/element",
            "growth, %",
            "extra B/element",
            "left B/element",
        ],
        rows,
        verdicts,
        [
            "The weights change between the steps. ns/element: of the median step. Growth: of the "
            f"resident set from step {GROWTH_FROM} to {num_steps}, as a share of the weights, with "
            "nothing done to collect garbage or to trim memory.",
            "Of the last step: extra is the rise of the resident set at its highest, less the new "
            "masks and masked weights, which take the place of the present ones when they are "
            "ready; left: after the step.",
        ],
    )


def follow(
    make: Pruner, schedule: Cubic, num_elements: int, at_step: Callable[..., None]
) -> nn.Module:
    """Prune a model at every step of a schedule, and change its weights in between."""
    model = data.build(num_elements)
    prune = make(model, schedule)
    weights = data.weights(model)
    generator = torch.Generator().manual_seed(2)
    largest = max(weight.numel() for weight in weights)
    noise = torch.empty(largest).normal_(0, 0.01 * data.STANDARD_DEVIATION, generator=generator)
    for step in range(1, schedule.end + 1):
        for weight in weights:
            weight.add_(noise[: weight.numel()].view(weight.shape), alpha=1.0 + 0.1 * (step % 7))
        at_step(model, step, lambda: prune(step))  # noqa: B023
    return model


def check(make: Pruner, schedule: Cubic, num_elements: int) -> None:
    """At the first, some, and the last step: exactly the oracle's masks."""

    def compare(model: nn.Module, step: int, prune: Callable[[], object]) -> None:
        if step not in (1, 2, GROWTH_FROM, schedule.end // 2, schedule.end):
            prune()
            return
        values, earlier = data.weights(model), data.masks(model)
        count = count_at(schedule, step, data.num_elements(model))
        expected = data.oracle(values, count, earlier)
        data.check_report(prune(), expected)
        found = data.masks(model)
        assert found is not None
        data.check_masks(values, found, expected, earlier)

    follow(make, schedule, num_elements, compare)


def followed(
    make: Pruner, schedule: Cubic, num_elements: int
) -> tuple[list[float], dict[int, int]]:
    """Seconds of every step; resident bytes after every step."""
    seconds, resident = [], {}

    def note(model: nn.Module, step: int, prune: Callable[[], object]) -> None:
        started = time.perf_counter()
        prune()
        seconds.append(time.perf_counter() - started)
        resident[step] = resident_bytes()

    release_memory()
    follow(make, schedule, num_elements, note)
    return seconds, resident


def memory_of_a_step(make: Pruner, schedule: Cubic, num_elements: int) -> tuple[int, int, int]:
    """Elements; the last step's peak extra bytes, results aside; and what it left behind."""
    found = []

    def note(model: nn.Module, step: int, prune: Callable[[], object]) -> None:
        if step < schedule.end:
            prune()
        else:
            found.append(measured(prune))

    model = follow(make, schedule, num_elements, note)
    total = data.num_elements(model)
    return total, found[0].peak_extra_bytes - 8 * total, found[0].retained_bytes
