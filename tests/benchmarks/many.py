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
from collections.abc import Callable, Iterator, Sequence
from operator import truediv
from typing import Any

import data
import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from measuring import Bound, Cell, Options, Table, Verdict
from sharded_models import AMOUNT, prune
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
OURS = ("first", "second", "verify", "remove")
COMPARED = ("first", "second", "remove")
FORWARD = ("dense forward", "forward", "torch: forward")  # with gradients, of one token
COUNTED = ("calls: first", "calls: remove", "torch calls: first")
TORCH = tuple(f"torch: {call}" for call in COMPARED)
# What is aimed at for each parameter of 400: milliseconds, and how many times as fast as torch.
AIM_AT, AIM_PLAIN, AIM_OTHER, AIM_REMOVE, AIM_RATIO = 400, 0.05, 0.08, 0.045, 6.0
AIM_FORWARD = 1.1  # times a dense one
# Functions called for each parameter, by the number of parameters.
AIM_CALLS = {1: 150, 400: 30}

# By call, milliseconds per parameter, round by round; by "calls: ..." functions, once.
Found = dict[str, list[float]]


def tables(options: Options) -> Iterator[Table]:
    models: list[int | str] = [1, 10] if options.quick else [*NUMBERS, RESNET]
    for wrapping in WRAPPINGS:
        found = {}
        for model in models:
            rounds = options.num_rounds(_rounds(model))
            (found[model],) = on_ranks(
                measure, 1, wrapping, model, rounds, options.device,
                device=options.device, timeout=1800,
            )  # fmt: skip
        yield _table(wrapping, found)


def _rounds(model: int | str) -> int:
    number = model if isinstance(model, int) else 1000
    return 1 if number > 1000 else 15 if number <= 10 else 5


def _table(wrapping: str, found: dict[int | str, Found]) -> Table:
    rows: list[list[Cell]] = []
    verdicts = []
    for model, calls in found.items():
        times = {name: statistics.median(rounds) for name, rounds in calls.items()}
        ratios = {call: _ratio(calls, call) for call in COMPARED}
        name = f"{model:,}" if isinstance(model, int) else model
        rows.append([name, *(times.get(call) for call in (*OURS, *TORCH, *FORWARD, *COUNTED))])
        about = f"{wrapping}, {name} parameters"
        if model == AIM_AT:
            for call in OURS:
                aim = AIM_PLAIN if (wrapping, call) == ("plain", "first") else AIM_OTHER
                bound = Bound(
                    f"{about}, {call}: ms each",
                    AIM_REMOVE if call == "remove" else aim,
                    is_aim=True,
                )
                verdicts.append(Verdict(bound, times[call]))
            text = f"{about}, forward: times the dense one"
            ratio = statistics.median(map(truediv, calls["forward"], calls["dense forward"]))
            verdicts.append(Verdict(Bound(text, AIM_FORWARD, is_aim=True), ratio))
        if wrapping == "plain" and model in AIM_CALLS:
            bound = Bound(
                f"{about}, first: functions called for each", AIM_CALLS[model], is_aim=True
            )  # type: ignore[index]
            verdicts.append(Verdict(bound, times["calls: first"]))
        for call in ("first", "second"):
            ratio = ratios[call]
            if ratio is not None:
                least = AIM_RATIO if (model, call) == (AIM_AT, "first") else 1.0
                text = f"{about}, {call}: times as fast as torch"
                verdicts.append(Verdict(Bound(text, least, at_least=True, is_aim=True), ratio))
    return Table(
        f"Many parameters, {wrapping}, one rank, one thread: ms of processor time per parameter",
        ["parameters", *OURS, *TORCH, *FORWARD, *COUNTED],
        rows,
        verdicts,
        [
            f"Weights of {WIDTH} x {WIDTH}, float32, and those of a {RESNET}; amount "
            f"{AMOUNT} at each pruning. Medians, above 1,000 parameters of one round.",
            "calls: functions of Python and C that are called, per parameter.",
            "torch's calls take no sharded parameters.",
        ],
    )


def _ratio(calls: Found, call: str) -> float | None:
    if f"torch: {call}" not in calls:
        return None
    pairs = zip(calls[f"torch: {call}"], calls[call], strict=True)
    return statistics.median(theirs / own for theirs, own in pairs)


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

    def restore() -> None:
        with torch.no_grad():
            for parameter, value in zip(root.parameters(), saved, strict=True):
                parameter.copy_(value)

    def remove() -> None:
        for module, name in targets:
            distprune.remove(module, name)

    x = torch.randn(1, WIDTH, device=kind)
    runs = len(targets) <= AIM_AT and model != RESNET
    forward: list[tuple[str, Callable[[], Any]]] = [("forward", lambda: root(x))] * runs
    calls: list[tuple[str, Callable[[], Any]]] = [
        *((f"dense {name}", call) for name, call in forward),
        ("first", lambda: prune(targets)),
        ("second", lambda: prune(targets)),
        *forward,
        ("verify", lambda: distprune.verify(root)),
        ("remove", remove),
    ]
    of_torch = _torch_calls(targets) if wrapping in ("plain", "ddp") else []
    of_torch[2:2] = [(f"torch: {name}", call) for name, call in forward] if of_torch else []
    report = prune(targets)
    data.check_report(report, expected)
    masks = [module._buffers[f"{name}_mask"] for module, name in targets]
    own = [(mask.to_local() if hasattr(mask, "to_local") else mask).cpu() for mask in masks]
    data.check_masks(values, own, expected)
    remove()
    restore()
    found: Found = {}
    num_warm = int(len(targets) <= 1000)  # rounds that fill caches; among more it is no matter
    for number in range(num_warm + rounds):
        for name, call in (*calls, *of_torch):
            if name == "torch: first":
                restore()
            gc.collect()
            started = clock()
            call()
            seconds = clock() - started
            if number >= num_warm:
                found.setdefault(name, []).append(1e3 * seconds / len(targets))
        restore()
    counted = [("calls: first", lambda: prune(targets)), ("calls: remove", remove)]
    for _, call in of_torch[:1]:
        counted.append(("torch calls: first", call))
    for name, call in counted:
        found[name] = [num_calls(call) / len(targets)]
    return found


def num_calls(call: Callable[[], Any]) -> int:
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


def _torch_calls(targets: Sequence[tuple[nn.Module, str]]) -> list[tuple[str, Callable[[], Any]]]:
    pairs = [tuple(pair) for pair in targets]

    def prune_by_torch() -> None:
        torch_prune.global_unstructured(
            pairs, pruning_method=torch_prune.L1Unstructured, amount=AMOUNT
        )

    def remove() -> None:
        for module, name in pairs:
            torch_prune.remove(module, name)

    return list(zip(TORCH, (prune_by_torch, prune_by_torch, remove), strict=True))


def linears(number: int, width: int) -> nn.Sequential:
    """Square layers, in groups that FSDP2 gathers together."""
    layers = []
    for start in range(0, number, PER_LAYER):
        size = min(PER_LAYER, number - start)
        layers.append(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(size))))
    return nn.Sequential(*layers)


def _resnet() -> nn.Sequential:
    """The weights of a ResNet-50 that are pruned: its convolutions and its classifier."""
    modules: list[nn.Module] = [nn.Conv2d(3, 64, 7, bias=False)]
    channels = 64
    for width, num_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(num_blocks):
            modules.append(nn.Conv2d(channels, width, 1, bias=False))
            modules.append(nn.Conv2d(width, width, 3, bias=False))
            modules.append(nn.Conv2d(width, 4 * width, 1, bias=False))
            if number == 0:
                modules.append(nn.Conv2d(channels, 4 * width, 1, bias=False))
            channels = 4 * width
    return nn.Sequential(nn.Sequential(*modules, nn.Linear(channels, 1000, bias=False)))


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
            plan = {
                name: ColwiseParallel()
                for name, module in layer.named_children()
                if isinstance(module, nn.Linear)
            }
            parallelize_module(layer, mesh, plan, src_data_rank=None)
    return root
