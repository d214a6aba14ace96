"""Pruning by text of a model that is larger than the memory that a process may have.

    python tests/benchmarks/bench_streaming.py [--bytes 12e9] [--limit 8e9] [--update 4]
        [--folder DIR] [--save NAME]

Makes a bf16 Llama checkpoint, and prunes it by text (random tokens) in a process of its own, whose
data may not take more than the limit: scores by gradients of every matrix of the layers. The
process is killed (SIGKILL) once in each pass, and started again. A second pruning moves the kept
weights of a projection in every ``--update``-th layer, since least squares for all of them would
take hours on a CPU. Peak memory stands beside what ``distprune plan --text`` says; the first result
is compared, to the byte, with that of a run that nobody kills.

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

from bench_checkpoint import make

RESULTS = Path(__file__).parent / "results"
WINDOWS, LENGTH = 2, 16


def prune(source: Path, destination: Path, limit: int, include: list[str]) -> None:
    """What the measured process does; writes what it took beside the destination."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    import torch

    from distprune import streaming
    from distprune.files.recipe import FileRecipe
    from distprune.language_models import TokenWindows

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 1000, (WINDOWS, LENGTH), generator=generator)
    text_of = torch.zeros(WINDOWS, dtype=torch.int64)
    windows = TokenWindows(("random",), tokens, text_of, None, has_bos=False)
    recipe = FileRecipe(
        sparsity=0.5, score="fisher", normalize=None, include=tuple(include) or None
    )
    update = "least_squares" if include else "none"
    cost = streaming.estimate(source, recipe, WINDOWS, LENGTH, update=update)
    began = time.perf_counter()
    streaming.prune_folder(source, destination, recipe, windows, update=update)
    facts = {
        "seconds": time.perf_counter() - began,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "estimate": cost.peak,
    }
    destination.with_suffix(".json").write_text(json.dumps(facts))


def start(source: Path, destination: Path, limit: int, include: list[str]) -> subprocess.Popen:
    command = [sys.executable, __file__, "--worker", str(source), str(destination), str(limit)]
    return subprocess.Popen([*command, *include])


def killed_in_each_pass(source: Path, destination: Path, limit: int) -> list[str]:
    """Prune, and kill the process when a pass is half done; returns where."""
    progress = destination.with_name(f"{destination.name}.partial-text") / "progress.json"
    num_layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    kills = []
    for name in ("forward", "backward"):
        process = start(source, destination, limit, [])
        while process.poll() is None:
            done = json.loads(progress.read_text()) if progress.exists() else {}
            if len(done.get(name, [])) >= num_layers // 2:
                process.send_signal(signal.SIGKILL)
                kills.append(f"{name}, layer {len(done[name])} of {num_layers}")
                break
            time.sleep(0.2)
        process.wait()
    assert start(source, destination, limit, []).wait() == 0
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=12e9)
    parser.add_argument("--limit", type=float, default=8e9)
    parser.add_argument("--update", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--save")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    limit = int(arguments.limit)
    try:
        source = folder / "source"
        make(source, arguments.bytes)
        size = sum(file.stat().st_size for file in source.iterdir())
        num_layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
        lines = [
            f"A Llama of {size / 1e9:.1f} GB in bf16, {num_layers} layers; {WINDOWS} windows of "
            f"{LENGTH} tokens; a process may have {limit / 1e9:.1f} GB of data.",
            "",
        ]
        one, other = folder / "whole", folder / "killed"
        assert start(source, one, limit, []).wait() == 0
        kills = killed_in_each_pass(source, other, limit)
        names = sorted(str(p.relative_to(one)) for p in one.rglob("*") if p.is_file())
        for name in names:
            if not name.endswith("run.json"):
                same = subprocess.run(["cmp", "-s", one / name, other / name], check=False)
                assert same.returncode == 0, name
        facts = json.loads((folder / "whole.json").read_text())
        lines += [
            f"scores by gradients, all matrices, ranked globally: {facts['seconds']:.0f} s, peak "
            f"{facts['peak'] / 1e9:.2f} GB (plan: {facts['estimate'] / 1e9:.2f} GB)",
            f"killed ({'; '.join(kills)}) and started again: the same bytes, {len(names)} files",
        ]
        shutil.rmtree(one)
        shutil.rmtree(other)
        layers = range(0, num_layers, arguments.update)
        include = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in layers]
        assert start(source, folder / "moved", limit, include).wait() == 0
        facts = json.loads((folder / "moved.json").read_text())
        lines.append(
            f"scores and least squares, one projection of {len(include)} layers: "
            f"{facts['seconds']:.0f} s, peak {facts['peak'] / 1e9:.2f} GB (plan: "
            f"{facts['estimate'] / 1e9:.2f} GB)"
        )
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
        source, destination, limit, *include = sys.argv[2:]
        prune(Path(source), Path(destination), int(limit), include)
    else:
        main()
