"""What importing distprune costs a program that has torch: every part in a new interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator

from measuring import Bound, CheckFailed, Options, Table, Verdict, interleaved

ROUNDS = 11
CONTESTANTS = {
    "import distprune": "import distprune",
    "... and distprune._public": "import distprune, distprune._public",
    "... and every public name of it": (
        "import distprune, distprune._public\n"
        "for name in distprune.__all__: getattr(distprune, name)\n"
        "for name in distprune.schedule.__all__: getattr(distprune.schedule, name)"
    ),
}
BOUND = Bound("seconds that importing all of distprune adds to torch's", 0.2)


def tables(options: Options) -> Iterator[Table]:
    rounds = options.num_rounds(ROUNDS)
    calls = {
        name: lambda statements=statements: _seconds(statements)
        for name, statements in {"import torch": "pass", **CONTESTANTS}.items()
    }
    if not options.quick:
        for call in calls.values():
            call()  # compiled files and the disk's cache
    found = interleaved(calls, rounds)
    rows = [
        [
            name,
            statistics.median(torch for torch, _ in times),
            None if name == "import torch" else statistics.median(added for _, added in times),
        ]
        for name, times in found.items()
    ]
    yield Table(
        "Import, each in a new interpreter",
        ["after import torch", "seconds of import torch", "seconds on top of it"],
        rows,
        [Verdict(BOUND, rows[-1][2])],
        [f"Medians of {rounds} rounds, in turn; both times are of the same interpreter."],
    )


def _seconds(statements: str) -> tuple[float, float]:
    """What ``import torch`` takes, and what ``statements`` take after it."""
    program = (
        "import time\nstarted = time.perf_counter()\nimport torch\nmiddle = time.perf_counter()\n"
        f"{statements}\nprint(middle - started, time.perf_counter() - middle)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if run.returncode:
        raise CheckFailed(f"{statements!r} failed:\n{run.stderr}")
    first, second = map(float, run.stdout.split())
    return first, second
