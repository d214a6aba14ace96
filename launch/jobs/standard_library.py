"""Python's standard library: real text that every machine already has."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

ROOT = Path(sysconfig.get_path("stdlib"))
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def source_files(*skipped_folders: str) -> list[Path]:
    """The .py files below `ROOT`, in order, without tests, packages of others and these folders."""
    skipped = _SKIPPED_FOLDERS | set(skipped_folders)
    files = sorted(ROOT.rglob("*.py"))
    return [file for file in files if not skipped & set(file.relative_to(ROOT).parts)]


def is_held_out(file: Path, one_in: int) -> bool:
    """Whether a file is one of the share that is held out.

    By a hash of its name: a file stays on its side when others come and go between versions of
    Python.
    """
    name = file.relative_to(ROOT).as_posix()
    return hashlib.sha256(name.encode()).digest()[0] % one_in == 0
