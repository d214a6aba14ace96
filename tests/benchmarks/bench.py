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
import multiprocessing
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from measuring import Options, Table, layout, machine  # noqa: E402

RESULTS = Path(__file__).parent / "results"
# Each is a file beside this one, with a function ``tables(options)`` that yields tables.
PARTS = ("one_process", "ranks", "scopes", "many", "training_step")
# Those that measure on another device than a CPU.
PARTS_OF_DEVICES = ("one_process", "many", "training_step")


def run_part(name: str, options: Options) -> tuple[list[Table], str]:
    """One part, in this process: its tables, printed as they come, and the error that ended it."""
    tables: list[Table] = []
    try:
        part = importlib.import_module(name)
        gc.freeze()  # what is imported is never garbage, and takes long to look through
        for table in part.tables(options):
            print(table.text(), end="\n\n", flush=True)
            tables.append(table)
    except Exception:
        return tables, traceback.format_exc()
    return tables, ""


def start_part(name: str, options: Options) -> dict[str, Any]:
    """One part, in a new process: its memory and imports are no one else's."""
    print(f"=== {name}", flush=True)
    started = time.perf_counter()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            tables, error = pool.submit(run_part, name, options).result()
        except BrokenProcessPool:
            tables, error = [], "its process was killed"
    if error:
        print(error, file=sys.stderr)
    return {
        "part": name, "seconds": time.perf_counter() - started, "error": error, "tables": tables
    }  # fmt: skip


def summary(found: list[dict[str, Any]], is_judged: bool) -> tuple[list[str], bool]:
    """A line per bound, and whether all hold and every part came to its end."""
    rows: list[list[Any]] = [["", "measured", "bound", ""]]
    all_hold = True
    for part in found:
        for verdict in (each for table in part["tables"] for each in table.verdicts):
            words = "holds" if verdict.holds else "DOES NOT HOLD"
            if verdict.is_aim:
                words = "aim: " + ("met" if verdict.holds else "missed")
            elif is_judged:
                all_hold &= verdict.holds
            limit = f"{'>=' if verdict.at_least else '<='} {verdict.limit:g}"
            words = words if is_judged else "not judged"
            rows.append([f"{part['part']}: {verdict.text}", verdict.value, limit, words])
        if part["error"]:
            all_hold = False
            rows.append([f"{part['part']}: no end", None, "", "FAILED"])
    return layout(rows), all_hold


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
    given = parser.parse_args(arguments)
    parts = PARTS if given.device == "cpu" else PARTS_OF_DEVICES
    given.parts = given.parts.split(",") if given.parts else list(parts)
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    return given


def main() -> None:
    given = parse(sys.argv[1:])
    head = [" ".join(["python tests/benchmarks/bench.py", *sys.argv[1:]]), *machine()]
    print("\n".join(head), end="\n\n", flush=True)
    found, lines, all_hold = [], [], True
    for name in given.parts:
        found.append(start_part(name, Options(given.quick, given.rounds, given.device)))
        lines, all_hold = summary(found, is_judged=not given.quick)
        if given.save:  # after every part: a run may take long
            text = "\n".join(head) + "\n\n"
            for part in found:
                text += f"=== {part['part']} ({part['seconds']:.0f} s)\n\n"
                text += "".join(table.text() + "\n\n" for table in part["tables"])
            parts = [{**part, "tables": [asdict(t) for t in part["tables"]]} for part in found]
            values = {"command": head[0], "machine": head[1:], "parts": parts}
            (RESULTS / f"{given.save}.txt").write_text(text + "\n".join(lines) + "\n")
            (RESULTS / f"{given.save}.json").write_text(json.dumps(values, indent=1) + "\n")
    print("\n".join(lines))
    sys.exit(0 if all_hold else 1)


if __name__ == "__main__":
    main()
