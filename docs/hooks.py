"""Hooks of mkdocs: before each build, scripts make the parts that pages include."""

from __future__ import annotations

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
    for script, part in PARTS.items():
        subprocess.run([sys.executable, DOCS / script, folder / part], check=True, cwd=DOCS.parent)
