"""Hooks of mkdocs: before each build, the parts that pages include are made."""

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
# Files of the repository's root that pages include, up to a heading: their links begin in the root.
OF_THE_ROOT = {"README.md": "\n## Try it\n", "CHANGELOG.md": None, "CONTRIBUTING.md": None}


def as_part(text: str, end: str | None) -> str:
    """A page of the root, up to a heading, with links as the pages in docs/ need them."""
    if end is not None:
        text, found, _ = text.partition(end)
        assert found, f"no section {end.strip()}"
    return text.replace("](docs/", "](")


def on_pre_build(config: Any) -> None:
    """Make every part; mkdocs.yml has their folder among those that are included."""
    folder = DOCS.parent / "build" / "docs_parts"
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUTF8": "1"}  # whatever the locale
    for script, part in PARTS.items():
        with (folder / part).open("wb") as file:
            command = [sys.executable, DOCS / script]
            subprocess.run(command, stdout=file, env=environment, check=True, cwd=DOCS.parent)
    for name, end in OF_THE_ROOT.items():
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        (folder / f"root_{name}").write_text(as_part(text, end), encoding="utf-8")
