"""Run a shell script of the checkout as its users do."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(script: str, *arguments: object, **environment: object) -> subprocess.Popen:
    """Start a script given by its path in the checkout; its output is kept."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    return subprocess.Popen(
        ["sh", str(ROOT / script), *map(str, arguments)],
        env={**clean, "PYTHON": sys.executable, **{k: str(v) for k, v in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(script: str, *arguments: object, **environment: object) -> tuple[int, str]:
    """Run a script to its end; its exit status and what it printed, errors too."""
    process = start(script, *arguments, **environment)
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, output
