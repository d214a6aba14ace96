"""Hooks of mkdocs: before each build, scripts make the parts that pages include."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PARTS = {
    "trace_of_a_call.py": "trace_of_a_call.txt",
    "help_of_commands.py": "help_of_commands.md",
    "session_of_commands.py": "session_of_commands.txt",
}


def on_pre_build(config: Any) -> None:
    """Run every script; mkdocs.yml has the folder of the parts among those that are included."""
    folder = DOCS.parent / "build" / "docs_parts"
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUTF8": "1"}  # whatever the locale
    for script, part in PARTS.items():
        with (folder / part).open("wb") as file:
            command = [sys.executable, DOCS / script]
            subprocess.run(command, stdout=file, env=environment, check=True, cwd=DOCS.parent)
