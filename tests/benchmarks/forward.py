"""The host's work in a forward of pruned layers, beside dense ones and those that torch has pruned.

Weights are so small that the time is the host's: of Python, and of launching kernels. Processor
time of the process, one thread, divided by the number of layers, without gradients and with them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator

import data
import torch
import torch.nn.utils.prune as torch_prune
from many import WRAPPINGS, linears, wrapped
from measuring import Bound, Cell, Options, Table, Verdict
from sharded_models import AMOUNT, prune

import distprune
from helpers.on_ranks import on_ranks

NUM_LAYERS, WIDTH = 100, 64
KINDS = ("dense", "pruned", "pruned by torch")
AIM = 1.1
# Of each kind of model, microseconds per layer, round by round.
Found = dict[str, list[float]]


def tables(options: Options) -> Iterator[Table]:
    rows: list[list[Cell]] = []
    verdicts = []
    for wrapping in WRAPPINGS:
        for grad in (True, False):
            (found,) = on_ranks(measure, 1, wrapping, grad, options.num_rounds(40))
            times = {kind: statistics.median(rounds) for kind, rounds in found.items()}
            pairs = zip(found["pruned"], found["dense"], strict=True)
            ratio = statistics.median(own / other for own, other in pairs)
            what = "with gradients" if grad else "without"
            rows.append([f"{wrapping}, {what}", *map(times.get, KINDS), ratio])
            text = f"{wrapping}, {what}: times the dense forward"
            verdicts.append(Verdict(Bound(text, AIM, is_aim=True), ratio))
    yield Table(
        f"Forward, one rank, one thread: microseconds of processor time per layer of {WIDTH} x "
        f"{WIDTH}, one token",
        ["", *KINDS, "pruned, times dense"],
        rows,
        verdicts,
        [f"{NUM_LAYERS} layers. Medians of the rounds, and of their ratios."],
    )


def measure(wrapping: str, grad: bool, rounds: int) -> Found:
    """On one rank: both models in turn."""
    kinds = KINDS if wrapping in ("plain", "ddp") else KINDS[:2]
    models = {}
    for kind in kinds:
        layers = linears(NUM_LAYERS, WIDTH)
        data.fill_normal(layers)
        model = models[kind] = wrapped(layers, wrapping)
        targets = distprune.select(model, include=["*.weight"])
        if kind == "pruned":
            prune(targets)
        elif kind != "dense":
            for module, name in targets:
                torch_prune.l1_unstructured(module, name, amount=AMOUNT)
    x = torch.randn(1, WIDTH)
    found: Found = {kind: [] for kind in models}
    gc.collect()
    for number in range(3 + rounds):
        for kind, model in models.items():
            with torch.set_grad_enabled(grad):
                started = time.process_time()
                model(x)
                seconds = time.process_time() - started
            if number >= 3:
                found[kind].append(1e6 * seconds / NUM_LAYERS)
    return found
