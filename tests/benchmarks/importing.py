"""What importing distprune costs a program that has torch: every part in a new interpreter."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from measuring import CheckFailed, Options, Table, Verdict, interleaved

ROUNDS = 11
CONTESTANTS = {
    "import distprune": "import distprune",
    "... and every public name of it": (
        "import distprune, distprune._public\n"
        "for name in distprune.__all__: getattr(distprune, name)\n"
        "for name in distprune.schedule.__all__: getattr(distprune.schedule, name)"
    ),
}


def tables(options: Options) -> Iterator[Table]:
    rounds = options.num_rounds(ROUNDS)
    calls = {name: partial(_seconds, program) for name, program in CONTESTANTS.items()}
    interleaved(calls, 1)  # compiled files and the disk's cache
    rows = [
        [name, *(statistics.median(times) for times in zip(*found, strict=True))]
        for name, found in interleaved(calls, rounds).items()
    ]
    yield Table(
        "Import, each in a new interpreter",
        ["after import torch", "seconds of import torch", "seconds on top of it"],
        rows,
        [Verdict("seconds that importing all of distprune adds to torch's", rows[-1][2], 0.2)],
        [f"Medians of {rounds} rounds, in turn; both times are of the same interpreter."],
    )


def _seconds(statements: str) -> tuple[float, float]:
    """What ``import torch`` takes, and what ``statements`` take after it."""
    program = (
        "import time\nstarted = time.perf_counter()\nimport torch\nmiddle = time.perf_counter()\n"
        f"{statements}\nprint(middle - started, time.perf_counter() - middle)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    if run.returncode:
        raise CheckFailed(f"{statements!r} failed:\n{run.stderr}")
    first, second = map(float, run.stdout.split())
    return first, second
