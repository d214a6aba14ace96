"""Many small parameters: the price of each, beside torch's own calls where they run.

Processor time of the process, one thread, divided by the number of parameters (on another device
the seconds until it has done everything), and the Python and C functions that are called, which do
not depend on the machine. Each wrapping is on one rank, which has all of every parameter: what is
measured is the host's work, not the traffic.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from operator import truediv
from typing import Any

import data
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from measuring import Options, Table, Verdict
from ranks import AMOUNT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import distprune
from helpers.on_ranks import on_ranks

WRAPPINGS = ("plain", "fsdp2", "tp", "ddp")
NUMBERS = (1, 10, 400, 10_000)
WIDTH = 64
# Parameters that FSDP2 gathers together, as it would those of a layer with an expert per module.
PER_LAYER = 100
RESNET = "ResNet-50"
FORWARD = ("dense forward", "forward", "torch: forward")  # with gradients, of one token
COLUMNS = (
    "first", "second", "verify", "remove", "torch: first", "torch: second", "torch: remove",
    *FORWARD, "calls: first", "calls: remove", "torch calls: first",
)  # fmt: skip
# What is aimed at for each parameter of 400: milliseconds; how many times as fast as torch a first
# pruning is, and how many times as long as a dense one a forward takes.
AIM_AT = 400
AIMS = {"first": 0.08, "second": 0.08, "verify": 0.08, "remove": 0.045}
AIM_PLAIN_FIRST, AIM_RATIO, AIM_FORWARD = 0.05, 6.0, 1.1
# Functions called for each parameter, by the number of parameters.
AIM_CALLS = {1: 150, 400: 30}

Call = Callable[[], Any]
# By call, milliseconds per parameter, round by round; by "calls: ..." functions, once.
Found = dict[str, list[float]]


def tables(options: Options) -> Iterator[Table]:
    models: list[int | str] = [1, 10] if options.quick else [*NUMBERS, RESNET]
    for wrapping in WRAPPINGS:
        rows, verdicts = [], []
        for model in models:
            number = model if isinstance(model, int) else 1000
            rounds = options.num_rounds(1 if number > 1000 else 15 if number <= 10 else 5)
            (found,) = on_ranks(
                measure, 1, wrapping, model, rounds, options.device,
                device=options.device, timeout=1800,
            )  # fmt: skip
            name = f"{model:,}" if isinstance(model, int) else model
            times = {call: statistics.median(rounds) for call, rounds in found.items()}
            rows.append([name, *(times.get(column) for column in COLUMNS)])
            verdicts += verdicts_on(wrapping, model, f"{wrapping}, {name} parameters", found)
        yield Table(
            f"Many parameters, {wrapping}, one rank, one thread: ms of processor time per "
            "parameter",
            ["parameters", *COLUMNS],
            rows,
            verdicts,
            [
                f"Weights of {WIDTH} x {WIDTH}, float32, and those of a {RESNET}; amount "
                f"{AMOUNT} at each pruning. Medians, above 1,000 parameters of one round.",
                "calls: functions of Python and C that are called, per parameter.",
                "torch's calls take no sharded parameters.",
            ],
        )


def verdicts_on(wrapping: str, model: int | str, about: str, found: Found) -> Iterator[Verdict]:
    def ratio(call: str, other: str) -> float:
        return statistics.median(map(truediv, found[call], found[other]))

    if model == AIM_AT:
        for call, aim in AIMS.items():
            aim = AIM_PLAIN_FIRST if (wrapping, call) == ("plain", "first") else aim
            value = statistics.median(found[call])
            yield Verdict(f"{about}, {call}: ms each", value, aim, is_aim=True)
        value = ratio("forward", "dense forward")
        yield Verdict(f"{about}, forward: times the dense one", value, AIM_FORWARD, is_aim=True)
    if wrapping == "plain" and model in AIM_CALLS:
        text = f"{about}, first: functions called for each"
        yield Verdict(text, found["calls: first"][0], AIM_CALLS[int(model)], is_aim=True)
    for call in ("first", "second"):
        if f"torch: {call}" in found:
            least = AIM_RATIO if (model, call) == (AIM_AT, "first") else 1.0
            text = f"{about}, {call}: times as fast as torch"
            value = ratio(f"torch: {call}", call)
            yield Verdict(text, value, least, at_least=True, is_aim=True)


def measure(wrapping: str, model: int | str, rounds: int, kind: str = "cpu") -> Found:
    """On one rank: check the masks, then time.

    Args:
        kind: the type of the device that has the parameters.
    """
    clock = time.process_time if kind == "cpu" else _when_all_is_done
    root = _resnet() if model == RESNET else linears(int(model), WIDTH)
    data.fill_normal(root)
    values = data.weights(root)
    expected = data.oracle(values, AMOUNT)
    root = wrapped(root.to(kind), wrapping)
    targets = distprune.select(root, include=["*.weight"])
    saved = [parameter.detach().clone() for parameter in root.parameters()]

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(root.parameters(), saved, strict=True):
            parameter.copy_(value)

    def calls_of(library: Any) -> tuple[Call, Call]:
        pairs = targets if library is distprune else [tuple(pair) for pair in targets]

        def prune() -> Any:
            return library.global_unstructured(pairs, library.L1Unstructured, amount=AMOUNT)

        def remove() -> None:
            for module, name in pairs:
                library.remove(module, name)

        return prune, remove

    prune, remove = calls_of(distprune)
    torch_first, torch_remove = calls_of(torch_prune)
    x = torch.randn(1, WIDTH, device=kind)
    runs = len(targets) <= AIM_AT and model != RESNET
    forward: list[tuple[str, Call]] = [("forward", lambda: root(x))] * runs
    calls: list[tuple[str, Call]] = [
        *((f"dense {name}", call) for name, call in forward),
        ("first", prune), ("second", prune), *forward,
        ("verify", lambda: distprune.verify(root)), ("remove", remove),
    ]  # fmt: skip
    counted = [("calls: first", prune), ("calls: remove", remove)]
    if wrapping in ("plain", "ddp"):
        calls += [
            ("torch: first", torch_first), ("torch: second", torch_first),
            *((f"torch: {name}", call) for name, call in forward), ("torch: remove", torch_remove),
        ]  # fmt: skip
        counted.append(("torch calls: first", torch_first))
    data.check_report(prune(), expected)
    masks = [module._buffers[f"{name}_mask"] for module, name in targets]
    data.check_masks(values, [data.local(mask).cpu() for mask in masks], expected)
    remove()
    restore()
    found: Found = {}
    num_warm = int(len(targets) <= 1000)  # rounds that fill caches; among more it is no matter
    for number in range(num_warm + rounds):
        for name, call in calls:
            if name == "torch: first":
                restore()
            gc.collect()
            started = clock()
            call()
            seconds = clock() - started
            if number >= num_warm:
                found.setdefault(name, []).append(1e3 * seconds / len(targets))
        restore()
    return found | {name: [num_calls(call) / len(targets)] for name, call in counted}


def num_calls(call: Call) -> int:
    """How many functions of Python and C a call calls."""
    number = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return number


def _when_all_is_done() -> float:
    torch.accelerator.synchronize()
    return time.perf_counter()


def linears(number: int, width: int) -> nn.Sequential:
    """Square layers, in groups that FSDP2 gathers together."""
    layers = []
    for start in range(0, number, PER_LAYER):
        size = min(PER_LAYER, number - start)
        layers.append(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(size))))
    return nn.Sequential(*layers)


def _resnet() -> nn.Sequential:
    """The weights of a ResNet-50 that are pruned: its convolutions and its classifier."""
    sizes, channels = [(3, 64, 7)], 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(num_blocks):
            sizes += [(channels, width, 1), (width, width, 3), (width, 4 * width, 1)]
            sizes += [(channels, 4 * width, 1)] * (number == 0)
            channels = 4 * width
    convolutions = (nn.Conv2d(*size, bias=False) for size in sizes)
    return nn.Sequential(nn.Sequential(*convolutions, nn.Linear(channels, 1000, bias=False)))


def wrapped(root: nn.Sequential, wrapping: str) -> nn.Module:
    """The model on all ranks, as one of WRAPPINGS."""
    if wrapping == "ddp":
        return DistributedDataParallel(root)
    kind = next(root.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if wrapping == "fsdp2":
        for layer in (*root, root):
            fully_shard(layer, mesh=mesh)
    elif wrapping == "tp":
        for layer in root:
            names = [n for n, module in layer.named_children() if isinstance(module, nn.Linear)]
            plan = {name: ColwiseParallel() for name in names}
            parallelize_module(layer, mesh, plan, src_data_rank=None)
    return root
