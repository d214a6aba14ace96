"""Measure what distprune promises, beside its rivals and the limits of the machine.

    python tests/benchmarks/bench.py [--parts a,b] [--quick] [--rounds N] [--save NAME]

Every part runs in a process of its own. Its results are checked against an oracle before anything
is timed, and what it measured is compared with bounds. The exit status is 1 if a bound does
not hold or a check failed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import Options, Table, layout, machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
# Each is a file beside this one, with a function ``tables(options)`` that yields tables.
PARTS = ("importing", "one_process", "ranks", "scopes", "many", "reconstructing", "training_step")
# Those that measure on another device than a CPU.
PARTS_OF_DEVICES = ("one_process", "many", "training_step")


def run_part(name: str, options: Options, out: Path) -> None:
    """One part, in this process: prints its tables as they come, and writes them to ``out``."""
    part = importlib.import_module(name)
    gc.freeze()  # what is imported is never garbage, and takes long to look through
    with out.open("w") as file:
        for table in part.tables(options):
            print(table.text(), end="\n\n", flush=True)
            file.write(json.dumps(table.json(), allow_nan=False) + "\n")
            file.flush()


def start_part(name: str, arguments: list[str]) -> dict[str, Any]:
    """One part, in a new process: its memory and imports are no one else's."""
    print(f"=== {name}", flush=True)
    started = time.perf_counter()
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tables")
        out.touch()
        process = subprocess.run(
            [sys.executable, __file__, *arguments, "--run", name, str(out)],
            env={**os.environ, "PYTHONPATH": path},
        )
        tables = [json.loads(line) for line in out.read_text().splitlines()]
    return {
        "part": name,
        "seconds": time.perf_counter() - started,
        "exit status": process.returncode,
        "tables": tables,
    }


def summary(found: list[dict[str, Any]], is_judged: bool) -> tuple[list[str], bool]:
    """A line per bound, and whether all hold and every part came to its end."""
    rows: list[list[Any]] = [["", "measured", "bound", ""]]
    all_hold = True
    for part in found:
        for table in part["tables"]:
            for verdict in Table.from_json(table).verdicts:
                bound = verdict.bound
                words = "holds" if verdict.holds else "DOES NOT HOLD"
                if bound.is_aim:
                    words = "aim: " + ("met" if verdict.holds else "missed")
                elif is_judged:
                    all_hold &= verdict.holds
                limit = f"{'>=' if bound.at_least else '<='} {bound.limit:g}"
                words = words if is_judged else "not judged"
                rows.append([f"{part['part']}: {bound.text}", verdict.value, limit, words])
        if part["exit status"]:
            all_hold = False
            rows.append([f"{part['part']}: exit status {part['exit status']}", None, "", "FAILED"])
    if len(rows) == 1:
        return ["no bounds in these parts"], all_hold
    return layout(rows), all_hold


def save(name: str, text: str, values: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.txt").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--parts", help="names, separated by commas; by default all that run on the device"
    )
    parser.add_argument("--device", default="cpu", help="the type of a device (default: cpu)")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one round; bounds are not judged"
    )
    parser.add_argument("--rounds", type=int, help="how often each contestant runs")
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.txt and .json")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    parts = PARTS if given.device == "cpu" else PARTS_OF_DEVICES
    given.parts = given.parts.split(",") if given.parts else list(parts)
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds {given.rounds}; expected at least 1")
    return given


def main() -> None:
    arguments = sys.argv[1:]
    given = parse(arguments)
    if given.run:
        name, out = given.run
        return run_part(name, Options(given.quick, given.rounds, given.device), Path(out))
    command = " ".join(["python tests/benchmarks/bench.py", *arguments])
    head = [command, *machine()]
    print("\n".join(head), end="\n\n", flush=True)
    found, lines, all_hold = [], [], True
    for name in given.parts:
        found.append(start_part(name, arguments))
        lines, all_hold = summary(found, is_judged=not given.quick)
        if given.save:  # after every part: a run may take long
            body = [
                f"=== {part['part']} ({part['seconds']:.0f} s)\n\n"
                + "".join(Table.from_json(table).text() + "\n\n" for table in part["tables"])
                for part in found
            ]
            text = "\n".join(head) + "\n\n" + "".join(body) + "\n".join(lines) + "\n"
            save(given.save, text, {"command": command, "machine": head[1:], "parts": found})
    print("\n".join(lines))
    sys.exit(0 if all_hold else 1)


if __name__ == "__main__":
    main()
