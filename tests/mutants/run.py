"""Plants small faults in a copy of the package, one by one, and says which of them tests find.

    python tests/mutants/run.py                      # all rows of faults.toml
    python tests/mutants/run.py "ranking-*" masks-a-hook-stays

A fault is found if the tests of its row pass without it, and fail with it. Exit code 1: one is not.
"""

import argparse
import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]
FAULTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
NOT_COPIED = shutil.ignore_patterns(".*", "runs", "build", "dist", "__pycache__")
FOUND, MISSED, FAILS_ANYWAY = "found", "NOT FOUND", "FAILS WITHOUT IT"
# What pytest returns if all tests pass, or if one fails; anything else is an error of the row.
PASSED, FAILED = 0, 1
MOST_SECONDS = 300  # of the tests of a row: a fault may let ranks wait for each other


def find(package: Path, fault: dict) -> Path:
    """The file that has the text of a fault.

    Raises:
        ValueError: it is not there exactly once.
    """
    room = package / fault["room"]
    files = [room] if room.is_file() else sorted(room.rglob("*.py"))
    counts = {file: file.read_text().count(fault["old"]) for file in files}
    if sum(counts.values()) != 1:
        raise ValueError(f"{fault['room']} has {sum(counts.values())} times: {fault['old']}")
    return max(counts, key=counts.__getitem__)


def exit_code(copy: Path, tests: list[str]) -> int:
    """Run tests of a copy of the project; ``FAILED`` too if they hang."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    # Compiled files tell that a text has changed by whole seconds and by its size.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*command, *(f"tests/{test}" for test in tests)],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return FAILED
    if process.returncode not in (PASSED, FAILED):
        print(output[-2000:])
    return process.returncode


def verdict_on(copy: Path, fault: dict) -> str:
    """Whether the tests of a row find its fault."""
    if exit_code(copy, fault["tests"]) != PASSED:
        return FAILS_ANYWAY
    path = find(copy / "distprune", fault)
    text = path.read_text()
    path.write_text(text.replace(fault["old"], fault["new"]))
    try:
        return FOUND if exit_code(copy, fault["tests"]) == FAILED else MISSED
    finally:
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=["*"], help="of faults; globs")
    wanted = parser.parse_args().names
    names = [name for name in FAULTS if any(fnmatch.fnmatch(name, each) for each in wanted)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
        verdicts = {}
        for name in names:
            start = time.monotonic()
            verdicts[name] = verdict_on(copy, FAULTS[name])
            seconds = time.monotonic() - start
            print(f"{verdicts[name]:<{len(FAILS_ANYWAY)}} {seconds:4.0f} s  {name}", flush=True)
    num_found = sum(verdict == FOUND for verdict in verdicts.values())
    print(f"{num_found} of {len(names)} faults are found.")
    return int(num_found < len(names) or not names)


if __name__ == "__main__":
    sys.exit(main())
