"""Pruning by text of a model that is larger than the memory that a process may have.

    python tests/benchmarks/bench_streaming.py [--bytes 12e9] [--limit 8e9] [--dtype bfloat16]
        [--folder DIR] [--save NAME]

Makes a bf16 Llama checkpoint, and prunes it by text (random tokens) in a process of its own, whose
data may not take more than the limit: scores by gradients of every matrix of the layers; then least
squares for one projection of every fourth layer, since all of them would take hours on a CPU. Peak
memory stands beside what ``distprune plan --text`` says. Layers compute in ``--dtype``: float32 is
faster on a CPU without products of bf16, and takes twice the memory of a layer.

Needs twice the checkpoint's size on the disk.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench_checkpoint import ROOT, make

RESULTS = Path(__file__).parent / "results"
WINDOWS, LENGTH = 2, 16
EVERY = 4  # of the layers whose kept weights move


def prune(source: Path, destination: Path, limit: int, dtype: str, include: tuple[str, ...]) -> str:
    """What the measured process does; what it took."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import torch

    from distprune import streaming
    from helpers.recipes import raw_recipe
    from helpers.streaming import tokens

    windows = tokens(WINDOWS, 0, vocabulary=1000, length=LENGTH)
    keys = {"score": "fisher", "normalize": None, "include": include or None}
    recipe = raw_recipe(sparsity=0.5, **keys)
    options: dict[str, Any] = {"update": "least_squares" if include else "none"}
    options["dtype"] = getattr(torch, dtype)
    cost = streaming.estimate(source, recipe, WINDOWS, LENGTH, **options)
    began = time.perf_counter()
    streaming.prune_folder(source, destination, recipe, windows, **options)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"{seconds:.0f} s, peak {peak / 1e9:.2f} GB (plan: {cost.peak / 1e9:.2f} GB)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=float, default=12e9)
    parser.add_argument("--limit", type=float, default=8e9)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary one by default")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.txt")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        source = Path(folder, "source")
        make(source, given.bytes)
        size = sum(file.stat().st_size for file in source.iterdir())
        num_layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
        lines = [
            f"A Llama of {size / 1e9:.1f} GB in bf16, {num_layers} layers, which compute in "
            f"{given.dtype}; {WINDOWS} windows of {LENGTH} tokens; a process may have "
            f"{given.limit / 1e9:.1f} GB of data.",
            "",
        ]
        layers = range(0, num_layers, EVERY)
        moved = tuple(f"model.layers.{layer}.self_attn.q_proj.weight" for layer in layers)
        for number, (what, include) in enumerate({
            "scores by gradients, all matrices, ranked globally": (),
            f"scores and least squares, one projection of {len(moved)} layers": moved,
        }.items()):  # fmt: skip
            arguments = int(given.limit), given.dtype, include
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                took = pool.submit(prune, source, Path(folder, str(number)), *arguments).result()
            lines.append(f"{what}: {took}")
    command = " ".join(["python tests/benchmarks/bench_streaming.py", *sys.argv[1:]])
    text = "\n".join([*lines, "", f"{os.cpu_count()} cores, {platform.machine()}", command, ""])
    print(text)
    if given.save:
        (RESULTS / f"{given.save}.txt").write_text(text)


if __name__ == "__main__":
    main()
