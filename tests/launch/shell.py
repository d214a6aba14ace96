"""Run a script of the checkout as its users do."""

import os
import subprocess
import sys
from pathlib import Path

from distprune.testing import preload

preload("distprune.language_models", "transformers.models.llama.modeling_llama")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "launch"))


def start(script: str, *arguments: object, **environment: object) -> subprocess.Popen:
    """Start a script, .sh or .py, given by its path in the checkout; its output is kept."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    settings = {"PYTHON": sys.executable, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT, **environment}
    return subprocess.Popen(
        [
            "sh" if script.endswith(".sh") else sys.executable,
            str(ROOT / script),
            *map(str, arguments),
        ],
        env={**clean, **{name: str(value) for name, value in settings.items()}},
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
