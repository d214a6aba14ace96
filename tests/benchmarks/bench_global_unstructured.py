"""Time, memory and communication of one global pruning, beside torch and beside gathering.

    python tests/benchmarks/bench_global_unstructured.py [--elements 100e6] [--nproc 2] [--rounds 3]

Everything is measured in one run, the contestants in turn, and the result is a ratio:
machines are noisy. The masks are checked against an oracle before anything is timed.

- one process: distprune against torch.nn.utils.prune, on the same plain model;
- several gloo ranks, FSDP2: distprune against gathering every tensor on every rank
  and pruning there (the only other way to the same masks). Peak extra memory is the rise
  of the resident set over the call, less the masks that it leaves behind.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune

RESULTS = Path(__file__).parent / "results"
AMOUNT = 0.5


class Layers(nn.Module):
    """Weights in the proportions of a decoder layer, as many as fit in ``num_elements``."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        width = 1024
        shapes = [(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]
        layers, left = [], num_elements
        while left >= width * width:
            rows, columns = shapes[len(layers) % len(shapes)]
            rows = min(rows, left // columns)
            layers.append(nn.Linear(columns, max(rows, 1), bias=False, device="meta"))
            left -= layers[-1].weight.numel()
        self.layers = nn.ModuleList(layers)


def build(num_elements: int) -> Layers:
    model = Layers(num_elements).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.normal_(generator=generator)
    return model


def pairs(model: Layers) -> list[tuple[nn.Module, str]]:
    return [(layer, "weight") for layer in model.layers]


def expected_threshold(model: Layers, k: int) -> float:
    """The k-th smallest magnitude, found by numpy on a copy of everything."""
    bits = np.concatenate([layer.weight.detach().view(-1).numpy() for layer in model.layers])
    bits = bits.view(np.int32) & 0x7FFFFFFF
    return float(np.partition(bits, k - 1)[k - 1 : k].view(np.float32)[0])


def undo(model: nn.Module) -> None:
    """Take masks off without touching the values, so that every round starts alike."""
    for layer in model.layers:
        hook = next(iter(layer._forward_pre_hooks))
        del layer._forward_pre_hooks[hook]
        layer._parameters["weight"] = layer._parameters.pop("weight_orig")
        del layer._buffers["weight_mask"]
        layer.__dict__.pop("weight", None)


def measured(call: Callable[[], Any]) -> tuple[float, int, Any]:
    """Seconds, rise of the resident set in bytes, result."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = _status("VmRSS")
    started = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - started
    return seconds, _status("VmHWM") - before, result


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) * 1024


def on_one_process(num_elements: int, rounds: int) -> dict[str, Any]:
    model = build(num_elements)
    total = sum(layer.weight.numel() for layer in model.layers)
    k = round(AMOUNT * total)
    threshold = expected_threshold(model, k)
    rows = []
    for _ in range(rounds):
        ours, our_bytes, report = measured(
            lambda: distprune.global_unstructured(
                pairs(model), distprune.L1Unstructured, amount=AMOUNT
            )
        )
        assert report.threshold == threshold and report.num_pruned_now == k
        zeros = sum(int((layer.weight_mask == 0).sum()) for layer in model.layers)
        assert zeros == k
        undo(model)
        theirs, their_bytes, _ = measured(
            lambda: torch_prune.global_unstructured(
                pairs(model), torch_prune.L1Unstructured, amount=AMOUNT
            )
        )
        undo(model)
        rows.append((ours, theirs, our_bytes, their_bytes))
    ours, theirs, our_bytes, their_bytes = zip(*rows, strict=True)
    # Both leave a mask and a product behind, 4 bytes each per element.
    left = 8 * total
    return {
        "elements": total,
        "seconds": statistics.median(ours),
        "torch seconds": statistics.median(theirs),
        "times faster": statistics.median(t / o for o, t in zip(ours, theirs, strict=True)),
        "peak extra bytes per element, results aside": (statistics.median(our_bytes) - left)
        / total,
        "torch: the same": (statistics.median(their_bytes) - left) / total,
    }


def on_ranks(rank: int, size: int, store: str, num_elements: int, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
    model = build(num_elements)
    total = sum(layer.weight.numel() for layer in model.layers)
    k = round(AMOUNT * total)
    threshold = expected_threshold(model, k)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    local = sum(layer.weight.to_local().numel() for layer in model.layers)
    rows = []
    for _ in range(rounds):
        dist.barrier()
        naive, naive_bytes, naive_zeros = measured(lambda: gather_and_prune(model))
        dist.barrier()
        ours, our_bytes, report = measured(
            lambda: distprune.global_unstructured(
                distprune.select(model), distprune.L1Unstructured, amount=AMOUNT
            )
        )
        zeros = [int((~layer.weight_mask.to_local()).sum()) for layer in model.layers]
        shared = torch.tensor([sum(zeros)])
        dist.all_reduce(shared)
        assert report.threshold == threshold and report.num_pruned_now == k == int(shared)
        assert naive_zeros == k
        rows.append((ours, naive, our_bytes - local, naive_bytes))
        for layer in model.layers:
            # Back to dense with the values untouched: a mask of ones, then remove.
            layer.weight_mask.to_local().fill_(True)
            distprune.remove(layer, "weight")
    if rank == 0:
        ours, naive, our_bytes, naive_bytes = zip(*rows, strict=True)
        result = {
            "elements": total,
            "ranks": size,
            "seconds": statistics.median(ours),
            "gather and torch seconds": statistics.median(naive),
            "times faster": statistics.median(n / o for o, n in zip(ours, naive, strict=True)),
            "bytes sent per rank": report.bytes_sent,
            "collectives": report.num_collectives,
            "peak extra MB per rank, masks aside": statistics.median(our_bytes) / 1e6,
            "the same, as a share of the rank's parameters": statistics.median(our_bytes)
            / (4 * local),
            "gather and torch: peak extra MB per rank": statistics.median(naive_bytes) / 1e6,
        }
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an ordinary exit


def gather_and_prune(model: Layers) -> int:
    """What one does without this library: every rank gets everything and prunes it."""
    whole = [nn.Linear(1, 1, bias=False) for _ in model.layers]
    for target, layer in zip(whole, model.layers, strict=True):
        target.weight = nn.Parameter(layer.weight.detach().full_tensor())
    torch_prune.global_unstructured(
        [(layer, "weight") for layer in whole], torch_prune.L1Unstructured, amount=AMOUNT
    )
    return sum(int((layer.weight_mask == 0).sum()) for layer in whole)


def show(title: str, result: dict[str, Any]) -> str:
    lines = [title]
    for name, value in result.items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        lines.append(f"  {name:<50} {text:>14}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=float, default=100e6)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", help="name of a result file to write beside this script")
    options = parser.parse_args()
    num_elements = int(options.elements)
    text = [
        f"python tests/benchmarks/bench_global_unstructured.py {' '.join(sys.argv[1:])}".rstrip(),
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}, "
        f"{os.cpu_count()} cores ({platform.machine()}), float32, amount={AMOUNT}; medians of "
        f"{options.rounds} rounds, contestants in turn",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder, "result.json"))
        store = str(Path(folder, "store"))
        mp.spawn(
            on_ranks,
            args=(options.nproc, store, num_elements, options.rounds, out),
            nprocs=options.nproc,
        )
        ranks = json.loads(Path(out).read_text())
    text.append(show(f"FSDP2 on {options.nproc} gloo ranks, 1 thread each", ranks))
    print("\n".join(text), flush=True)
    single = on_one_process(num_elements, options.rounds)
    text.append(show(f"one process, {torch.get_num_threads()} threads", single))
    print(text[-1], flush=True)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.save}.txt").write_text("\n".join(text) + "\n")
        (RESULTS / f"{options.save}.json").write_text(
            json.dumps({"ranks": ranks, "one process": single}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
