"""Memory, time and I/O of pruning a checkpoint, beside load + prune + save, and beside cp.

    python tests/benchmarks/bench_checkpoint.py [--bytes 3e9] [--rounds 1] [--folder DIR]
        [--contestants distprune cp ...]

Makes a bf16 Llama checkpoint and prunes half of its weights, globally, with `distprune prune` on
1, 2 and 3 processes, which divides each tensor by its rms; with transformers and
torch.nn.utils.prune, on raw magnitudes; and copies it with cp. All in one
run, in turn, each in processes of its own, with the source's pages dropped from the cache before.
Every contestant's files are synced. The results of 1, 2 and 3 processes are compared with each
other, to the byte.

Needs four times the checkpoint's size on the disk (twice with one contestant). torch needs many
times its size in memory: it is stopped where it asks for more than there is, and that is its
result.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
SPARSITY = 0.5
CONTESTANTS = ("distprune", "distprune, 2 processes", "distprune, 3 processes", "torch", "cp")
COLUMNS = ("seconds", "CPU seconds", "peak MB of a process", "MB read", "MB written")


def make(folder: Path, num_bytes: float) -> None:
    """Write a Llama of about that size in bf16, in files of at most half a gigabyte."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 2048 if num_bytes >= 1e9 else 512
    per_layer = 2 * 14.5 * width**2  # of q, o, k and v of four heads of 16, and three of the MLP
    num_layers = max(1, round((num_bytes - 4 * 16 * width**2) / per_layer))
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"], dtype="bfloat16", hidden_size=width,
        intermediate_size=4 * width, num_attention_heads=16, num_hidden_layers=num_layers,
        num_key_value_heads=4, vocab_size=16 * width, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    files: list[dict[str, torch.Tensor]] = [{}]
    for name, parameter in model.named_parameters():
        if sum(2 * each.numel() for each in files[-1].values()) + 2 * parameter.numel() > 5e8:
            files.append({})
        files[-1][name] = parameter
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, members in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(members, file)
        values = {
            name: (torch.randn(each.shape, generator=generator) * 0.02).bfloat16()
            for name, each in members.items()
        }
        save_file(values, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    sync(folder)


def sync(folder: Path, drop: bool = False) -> None:
    """Wait until the files of a folder are on the disk, and perhaps drop them from the cache."""
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if drop:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def prune_with_torch(source: Path, destination: Path) -> None:
    """What one does without distprune; embeddings and head stay dense, as there."""
    import torch
    from torch.nn.utils import prune
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    pairs = [(module, "weight") for module in linear]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=SPARSITY)
    for module, name in pairs:
        prune.remove(module, name)
    model.save_pretrained(destination)


def run_contestant(name: str, source: Path, destination: Path) -> None:
    if name == "torch":
        prune_with_torch(source, destination)
    elif name == "cp":
        subprocess.run(["cp", "-r", source, destination], check=True)
    else:
        command = ["prune", str(source), str(destination), "-q", "--sparsity", str(SPARSITY)]
        launcher: list[str] = []
        if name != "distprune":
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            launcher.append(name.split()[1])
        subprocess.run([sys.executable, *launcher, "-m", "distprune", *command], check=True)
    sync(destination)
    print(Path("/proc/self/io").read_text())  # with that of processes that have ended


def step(*arguments: object) -> tuple[dict[str, float], str, str]:
    """Run a part of this script in a process of its own: what it needs, its output and its error.

    This one stays small: a process counts what its parent had in memory when it was forked.
    """
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, "--step", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        preexec_fn=_leave_memory_to_others,
    )
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    needs = {
        "seconds": time.perf_counter() - began,
        "CPU seconds": usage.ru_utime + usage.ru_stime,
        "peak MB of a process": usage.ru_maxrss * 1024 / 1e6,
    }
    last = (err.strip().splitlines() or [""])[-1]
    error = f"exit code {process.returncode}: {last[:200]}" if process.returncode else ""
    return needs, out, error


def measure(name: str, source: Path, destination: Path) -> dict[str, Any]:
    """Seconds, peak memory of the largest process, bytes read and written."""
    sync(source, drop=True)
    needs, out, error = step("contestant", name, source, destination)
    if error:
        return {**needs, "failed": error}
    io = dict(line.split(": ") for line in out.splitlines() if ": " in line)
    return {**needs, "MB read": int(io["rchar"]) / 1e6, "MB written": int(io["wchar"]) / 1e6}


def _leave_memory_to_others() -> None:
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_DATA, (int(0.9 * available),) * 2)


def compete(
    folder: Path, num_bytes: float, rounds: int, contestants: list[str]
) -> tuple[str, dict[str, Any]]:
    source, destination = folder / "source", folder / "out"
    error = step("make", source, num_bytes)[2]
    if error:
        raise RuntimeError(error)
    size = sum(path.stat().st_size for path in source.iterdir())
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    several = [name for name in contestants if name in CONTESTANTS[:3]]
    for number in range(rounds * len(contestants)):
        name = contestants[number % len(contestants)]
        found[name].append(measure(name, source, destination))
        if name in several and (folder / "first").exists():  # all but times and memory
            command = ["diff", "-r", "--exclude", "report.json", folder / "first", destination]
            subprocess.run(command, check=True)
        elif name in several and len(several) > 1:
            destination.rename(folder / "first")
        shutil.rmtree(destination, ignore_errors=True)
    same = f"{', '.join(several)}: the same bytes" if len(several) > 1 else "nothing compared"
    lines = [
        f"python {shlex.join(['tests/benchmarks/bench_checkpoint.py', *sys.argv[1:]])}",
        f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}, "
        f"{os.cpu_count()} cores "
        f"({platform.machine()}), {os.sysconf('SC_PHYS_PAGES') * 4096 / 1e9:.0f} GB of memory; "
        f"{size / 1e6:,.0f} MB of bf16, sparsity {SPARSITY}; medians of {rounds} rounds, in turn",
        same,
        "",
        f"{'':26}" + "".join(f"{column:>22}" for column in COLUMNS),
    ]
    for name, results in found.items():
        failed = next((each["failed"] for each in results if "failed" in each), "")
        cells = [
            f"{statistics.median(each[key] for each in results):,.1f}" if key in results[0] else "-"
            for key in COLUMNS
        ]
        lines.append(f"{name:26}" + "".join(f"{cell:>22}" for cell in cells) + f"  {failed}")
    return "\n".join(line.rstrip() for line in lines), {"bytes": size, "results": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=float, default=3e9)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary one by default")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.txt and .json")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.step:
        case ["make", folder, num_bytes]:
            return make(Path(folder), float(num_bytes))
        case ["contestant", name, source, destination]:
            return run_contestant(name, Path(source), Path(destination))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        text, values = compete(
            Path(folder), options.bytes, options.rounds, list(options.contestants)
        )
    print(text)
    if options.save:
        (RESULTS / f"{options.save}.txt").write_text(text + "\n")
        (RESULTS / f"{options.save}.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
