"""Run the stages: each in a process of its own, with a time limit.

    tests/gpu/run.sh                                      all stages on the GPU, into build/gpu
    tests/gpu/run.sh --stages selftest,masks --out DIR    some of them
    tests/gpu/run.sh --device cpu --quick                 a rehearsal, with small sizes
    tests/gpu/run.sh --keep NAME --out DIR                keep what a GPU gave in tests/gpu/results/

After each stage, and while it runs, DIR has results.json and results.txt, of everything so far; and
log.txt, with all output. Needs torch and numpy; the stage `suite` needs pytest and hypothesis too.
The exit code is 1 if something failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATHS = [ROOT, ROOT / "tests", ROOT / "tests" / "benchmarks", HERE]

# In the order in which they run: name -> (seconds at most, what it is).
STAGES = {
    "selftest": (150, "the self-test: one NCCL rank; 2 and 4 ranks that share the GPU over gloo"),
    "masks": (240, "masks equal those of the CPU, bit for bit"),
    "ranking": (120, "8 billion elements: time, memory, share of the bandwidth"),
    "training": (240, "a training step under FSDP2, pruned beside dense"),
    "streams": (90, "weights that forward and backward see, under FSDP2's streams"),
    "graphs": (90, "a pruned forward and backward in CUDA graphs"),
    "allocators": (90, "leaks, too little memory, pinned memory, expandable segments"),
    "offload": (90, "policies that keep shards on the CPU"),
    "beside_torch": (120, "whole calls beside torch.nn.utils.prune"),
    "text": (150, "a checkpoint of 1 billion weights, pruned by text"),
    "large_text": (240, "a checkpoint of 8 billion weights, pruned by text"),
    "suite": (240, "the tests of the suite that take a device"),
}
MARGIN = 15  # seconds that are left for the end


def main() -> int:
    given = arguments()
    out: Path = given.out
    out.mkdir(parents=True, exist_ok=True)
    if given.keep:
        return keep(out, given.keep)
    began = time.monotonic()
    document: dict[str, Any] = {"facts": facts(given.device), "stages": {}}
    document["facts"]["quick"] = given.quick
    log = out / "log.txt"
    log.write_text("")
    for name in given.stages:
        left = given.seconds - MARGIN - (time.monotonic() - began)
        if left < 10:
            document["stages"][name] = {"status": "not run: no time was left", "parts": []}
        else:
            limit = min(STAGES[name][0], left)
            run_stage(name, limit, given, document, out, log)
        write(document, out)
    print((out / "results.txt").read_text().split("\n\n")[0])
    bad = [name for name, each in document["stages"].items() if each["status"] != "ok"]
    return int(bool(bad))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/gpu/run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages:\n"
        + "\n".join(f"  {name:<13}{text} (at most {s} s)" for name, (s, text) in STAGES.items()),
    )
    parser.add_argument("--stages", type=_stages, default=list(STAGES), metavar="A,B,...")
    default = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
    parser.add_argument("--out", type=Path, default=default, metavar="DIR")
    parser.add_argument("--device", default="cuda", help="cuda (default), xpu or cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes; always so on a CPU")
    parser.add_argument(
        "--seconds", type=float, default=590, help="for all stages together (default 590)"
    )
    parser.add_argument("--keep", metavar="NAME", help="run nothing; keep DIR's results")
    given = parser.parse_args()
    given.quick = given.quick or given.device == "cpu"
    return given


def _stages(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(STAGES))
    if unknown:
        raise argparse.ArgumentTypeError(f"no stage {unknown[0]!r}; expected {', '.join(STAGES)}")
    return names


def run_stage(
    name: str, limit: float, given: argparse.Namespace, document: Any, out: Path, log: Path
) -> None:
    """Run one stage, with its results in the document all the while."""
    print(f"== {name} (at most {limit:.0f} s): {STAGES[name][1]}", flush=True)
    stage: dict[str, Any] = {"status": "running", "parts": []}
    document["stages"][name] = stage
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="distprune-gpu-") as folder, log.open("a") as output:
        output.write(f"\n======== {name}\n")
        output.flush()
        path = Path(folder, "parts.json")
        command = [sys.executable, str(HERE / f"stage_{name}.py"), "--json", str(path)]
        command += ["--device", given.device] + ["--quick"] * given.quick
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        code = None
        while code is None and time.monotonic() - began < limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=1)
            _take_parts(stage, path)
            write(document, out)
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks that it started
            process.wait()
    stage["seconds"] = round(time.monotonic() - began, 1)
    untried = all(part["status"] == "not tried" for part in stage["parts"])
    if code is None:
        stage["status"] = f"failed: stopped after {limit:.0f} s"
    elif code == 0:
        stage["status"] = "not tried" if untried else "ok"
    else:
        wrong = sum(part["status"] == "failed" for part in stage["parts"])
        why = f"{wrong} parts" if wrong else f"it ended with code {code}: see log.txt"
        stage["status"] = f"failed: {why}"
    write(document, out)
    print(f"   {stage['status']}, {stage['seconds']} s", flush=True)


def _take_parts(stage: dict[str, Any], path: Path) -> None:
    if path.exists():
        stage["parts"] = json.loads(path.read_text())


def environment() -> dict[str, str]:
    paths = [*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


# In a process of its own: the runner takes no memory of the GPU.
_FACTS = """
import json, platform, sys, torch, numpy
device = torch.device(sys.argv[1])
found = {"python": platform.python_version(), "torch": torch.__version__,
         "numpy": numpy.__version__, "device": device.type, "platform": platform.platform()}
try:
    import triton
    found["triton"] = triton.__version__
except ImportError:
    found["triton"] = None
if device.type != "cpu":
    module = torch.get_device_module(device)
    found["name"] = module.get_device_name(0)
    found["memory_gb"] = round(module.get_device_properties(0).total_memory / 1e9, 1)
    found["count"] = module.device_count()
if device.type == "cuda":
    found["cuda"], found["nccl"] = torch.version.cuda, ".".join(map(str, torch.cuda.nccl.version()))
    found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
print(json.dumps(found))
"""


def facts(device: str) -> dict[str, Any]:
    """What the results depend on, beside the code.

    Raises:
        SystemExit: the device cannot be used.
    """
    command = [sys.executable, "-c", _FACTS, device]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
        raise SystemExit(f"{device} cannot be used: {last}\nFor a rehearsal: --device cpu")
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    found["date"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        found["commit"] = subprocess.run(git, capture_output=True, text=True, check=False).stdout
        found["commit"] = found["commit"].strip() or None
    return found


def write(document: dict[str, Any], out: Path) -> None:
    """results.json and results.txt, of everything so far."""
    for name, text in (("json", json.dumps(document, indent=1)), ("txt", text_of(document))):
        partial = out / f"results.{name}.partial"
        partial.write_text(text + "\n")
        partial.replace(out / f"results.{name}")


def text_of(document: dict[str, Any]) -> str:
    """A summary; then all that was found."""
    known = document["facts"]
    head = [
        f"On {known.get('name', 'a CPU: a rehearsal')}, {known['date']}, commit {known['commit']}"
        + (", small sizes" if known["quick"] else ""),
        ", ".join(f"{key} {value}" for key, value in known.items() if key in _SHOWN),
    ]
    for name, stage in document["stages"].items():
        seconds = f", {stage['seconds']} s" if "seconds" in stage else ""
        head.append(f"{name:<14}{stage['status']}{seconds}")
        for part in stage["parts"]:
            if part["status"] != "ok":
                head.append(f"    {part['name']}: {part['status']}")
                reasons = part["wrong"] or part["lines"][-1:]
                head += [f"        {reason.splitlines()[0][:300]}" for reason in reasons[:5]]
    return "\n".join([*head, *_details(document)])


_SHOWN = ("python", "torch", "numpy", "triton", "cuda", "nccl", "memory_gb", "device")


def _details(document: dict[str, Any]) -> list[str]:
    sys.path.append(str(ROOT / "tests" / "benchmarks"))
    from measuring import Table

    lines = []
    for name, stage in document["stages"].items():
        lines += ["", f"==== {name}: {stage['status']}"]
        for part in stage["parts"]:
            lines += ["", f"-- {part['name']}: {part['status']}, {part.get('seconds', '?')} s"]
            lines += [f"   {line}" for line in part["lines"]]
            for table in part["tables"].values():
                lines += ["", *(f"   {row}" for row in Table.from_json(table).text().splitlines())]
            wrong = [f"WRONG: {reason}" for reason in part["wrong"]]
            lines += [f"   {reason}" for reason in wrong if reason not in part["lines"]]
    return lines


def keep(out: Path, name: str) -> int:
    """Copy results to tests/gpu/results/: those of a GPU only, and not those of small sizes."""
    known = json.loads((out / "results.json").read_text())["facts"]
    if known["device"] == "cpu" or known["quick"]:
        raise SystemExit(f"{out} has the results of a rehearsal, which are not kept")
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    for kind in ("json", "txt"):
        shutil.copyfile(out / f"results.{kind}", folder / f"{name}.{kind}")
    print(f"kept in {folder.relative_to(ROOT)}/{name}.json and .txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
