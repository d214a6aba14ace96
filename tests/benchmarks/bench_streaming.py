"""Pruning by text of a model that is larger than the memory that a process may have.

    python tests/benchmarks/bench_streaming.py [--bytes 12e9] [--limit 8e9] [--update 4]
        [--dtype bfloat16] [--folder DIR] [--save NAME]

Makes a bf16 Llama checkpoint, and prunes it by text (random tokens) in a process of its own, whose
data may not take more than the limit: scores by gradients of every matrix of the layers. A second
pruning moves the kept weights of a projection in every ``--update``-th layer, since least squares
for all of them would take hours on a CPU. Both are done twice: once as a whole, and once by
processes that are killed (SIGKILL), each in another phase, and started again. The results are
compared to the byte. Peak memory stands beside what ``distprune plan --text`` says.

Layers compute in ``--dtype``: float32 is faster on a CPU without products of bf16, and takes twice
the memory of a layer.

Needs three times the checkpoint's size on the disk.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_checkpoint import make

RESULTS = Path(__file__).parent / "results"
WINDOWS, LENGTH = 2, 16


def prune(source: Path, destination: Path, limit: int, dtype: str, include: list[str]) -> None:
    """What the measured process does; writes what it took beside the destination."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch

    from distprune import streaming
    from distprune.language_models import TokenWindows
    from helpers.recipes import raw_recipe

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 1000, (WINDOWS, LENGTH), generator=generator)
    text_of = torch.zeros(WINDOWS, dtype=torch.int64)
    windows = TokenWindows(("random",), tokens, text_of, has_bos=False)
    recipe = raw_recipe(
        sparsity=0.5, score="fisher", normalize=None, include=tuple(include) or None
    )
    options: Any = {
        "update": "least_squares" if include else "none", "dtype": getattr(torch, dtype)
    }  # fmt: skip
    cost = streaming.estimate(source, recipe, WINDOWS, LENGTH, **options)
    began = time.perf_counter()
    streaming.prune_folder(source, destination, recipe, windows, **options)
    facts = {
        "seconds": time.perf_counter() - began,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "estimate": cost.peak,
    }
    destination.with_suffix(".json").write_text(json.dumps(facts))


def start(source: Path, destination: Path, *arguments: Any) -> subprocess.Popen:
    """A process that prunes; the arguments are those of :func:`prune`."""
    limit, dtype, include = arguments
    command = [sys.executable, __file__, "--worker", source, destination, str(limit), dtype]
    return subprocess.Popen([*command, *include])


def phase(name: str, source: Path, destination: Path) -> str:
    """Where a pruning is, if it is well in a phase, or past it; else nothing.

    It is seen from the files that are written beside the destination.
    """
    progress = destination.with_name(f"{destination.name}.partial-text") / "progress.json"
    done = json.loads(progress.read_text()) if progress.exists() else {}
    if name in ("forward", "backward", "update"):
        num_layers, num_done = layers_of(source), len(done.get(name, []))
        return f"{name}, layer {num_done} of {num_layers}" * (num_done >= num_layers // 2)
    if name == "ranking":
        return name * bool(done.get("statistics"))
    partial = destination.with_name(f"{destination.name}.partial")
    return name * any(partial.glob("*.safetensors"))  # a weight file of the result is finished


def layers_of(source: Path) -> int:
    return json.loads((source / "config.json").read_text())["num_hidden_layers"]


def compared(
    folder: Path, source: Path, names: list[str], *arguments: Any
) -> tuple[dict[str, Any], str]:
    """Prune as a whole, and by processes that are killed in each of some phases; what it took."""
    one, other, kills = folder / "whole", folder / "killed", []
    assert start(source, one, *arguments).wait() == 0
    for name in names:
        process = start(source, other, *arguments)
        while process.poll() is None:
            if where := phase(name, source, other):
                time.sleep(1)  # into what follows
                process.send_signal(signal.SIGKILL)
                kills.append(where)
                break
            time.sleep(0.1)
        assert process.wait() == -signal.SIGKILL, f"it was never in {name}"
    assert start(source, other, *arguments).wait() == 0
    subprocess.run(["diff", "-r", "--exclude", "report.json", one, other], check=True)
    facts = json.loads((folder / "whole.json").read_text())
    shutil.rmtree(one)
    shutil.rmtree(other)
    return facts, f"killed ({'; '.join(kills)}) and started again: the same bytes"


def described(what: str, facts: dict[str, Any]) -> str:
    return (
        f"{what}: {facts['seconds']:.0f} s, peak {facts['peak'] / 1e9:.2f} GB (plan: "
        f"{facts['estimate'] / 1e9:.2f} GB)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=12e9)
    parser.add_argument("--limit", type=float, default=8e9)
    parser.add_argument("--update", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--save")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    limit = int(arguments.limit)
    try:
        source = folder / "source"
        make(source, arguments.bytes)
        size = sum(file.stat().st_size for file in source.iterdir())
        num_layers = layers_of(source)
        lines = [
            f"A Llama of {size / 1e9:.1f} GB in bf16, {num_layers} layers, which compute in "
            f"{arguments.dtype}; {WINDOWS} windows of {LENGTH} tokens; a process may have "
            f"{limit / 1e9:.1f} GB of data.",
            "",
        ]
        names = ["forward", "backward", "ranking", "writing"]
        facts, kept = compared(folder, source, names, limit, arguments.dtype, [])
        lines += [described("scores by gradients, all matrices, ranked globally", facts), kept]
        layers = range(0, num_layers, arguments.update)
        include = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in layers]
        facts, kept = compared(folder, source, ["update"], limit, arguments.dtype, include)
        what = f"scores and least squares, one projection of {len(include)} layers"
        lines += [described(what, facts), kept]
    finally:
        shutil.rmtree(folder)
    import torch

    command = " ".join(["python tests/benchmarks/bench_streaming.py", *sys.argv[1:]])
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    text = "\n".join([*lines, "", f"{machine}; other work beside it.", f"    {command}", ""])
    print(text)
    if arguments.save:
        (RESULTS / f"{arguments.save}.txt").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        source, destination, limit, dtype, *include = sys.argv[2:]
        prune(Path(source), Path(destination), int(limit), dtype, include)
    else:
        main()
