"""The place of a result: free, or taken by a finished result that is to be replaced.

A result that is replaced stays until the new one is complete. Then it is renamed to
``DST.partial-replaced``, the new one to DST, and the old one is removed. Where a run was killed in
between, the next one puts the old result back, or removes it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distprune.files.checkpoints.checkpoint import SIDECAR
from distprune.files.disk.access import sync_folder, writing
from distprune.files.errors import OutputError
from distprune.files.reports import REPORT_FILE


def check_own_folder(path: Path) -> None:
    """Raise OutputError if a path is a link, or not a folder."""
    if path.is_symlink() or not path.is_dir():
        problem = "is a link" if path.is_symlink() else "is not a folder"
        raise OutputError(
            f"{path} {problem}; expected a folder that distprune made. Nothing was written to it. "
            "Remove it, or choose another destination."
        )


def remove_folder(path: Path) -> None:
    """Remove a folder that distprune made, if it exists."""
    if os.path.lexists(path):
        check_own_folder(path)
        with writing(path):
            shutil.rmtree(path)


def sync_folders(path: Path) -> None:
    """Wait until the names in a folder and its subfolders are on the disk."""
    with writing(path):
        for folder, _, _ in os.walk(path):
            sync_folder(folder)


def check_free(destination: Path, *, is_replaceable: bool = False) -> None:
    """Raise OutputError if the destination exists.

    Args:
        is_replaceable: whether the command has an option that replaces a finished result.
    """
    if os.path.lexists(destination):
        is_done = (destination / REPORT_FILE).exists()
        state = "holds a finished result of distprune" if is_done else "exists"
        way = "Delete it, or choose another destination."
        if is_done and is_replaceable:
            way = "Add --force to replace it, or choose another destination."
        raise OutputError(f"{destination} {state}; expected a new name. {way}")


def check_place(source: str, destination: Path) -> None:
    """Raise OutputError if the destination is inside the source, or its parent is not a folder."""
    target, root = Path(os.path.realpath(destination)), Path(os.path.realpath(source))
    if target == root or root in target.parents:
        raise OutputError(
            f"{destination} is inside the source {source}; expected a path outside of it."
        )
    if not destination.parent.is_dir():
        raise OutputError(f"{destination.parent} is not a folder; create it first.")


def check_replaceable(destination: Path, inputs: Iterable[str | Path]) -> None:
    """Raise OutputError if what stands at the destination may not be replaced.

    Args:
        inputs: files that the new result is made from; none may be in the old one.
    """
    if not os.path.lexists(destination):
        return
    check_own_folder(destination)
    known = _files_of_result(destination)
    if known is None:
        raise OutputError(
            f"{destination} is no finished result of distprune; --force replaces nothing else. "
            "Delete it, or choose another destination."
        )
    place = Path(os.path.realpath(destination))
    for path in inputs:
        if place in Path(os.path.realpath(path)).parents:
            raise OutputError(
                f"{path} is in {destination}, which --force would replace; expected inputs "
                "outside of it. Choose another destination."
            )
    for folder, _, names in os.walk(destination):
        for name in names:
            inside = os.path.relpath(os.path.join(folder, name), destination)
            if inside not in known and Path(inside).parts[0] != SIDECAR:
                raise OutputError(
                    f"{destination / inside} was not written by distprune, and --force would "
                    "remove it. Move it elsewhere, or choose another destination."
                )


def _files_of_result(destination: Path) -> set[str] | None:
    """What stands beside ``distprune/`` by the report; None of what is no finished result."""
    try:
        report: Any = json.loads((destination / REPORT_FILE).read_text())
        if report["status"] != "complete" or not isinstance(report["digest"], str):
            return None
        return {*report["source"], *report["copied"], "README.md"}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _aside(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}.partial-replaced")


def has_replaced(destination: Path) -> bool:
    """Whether a run was killed while it replaced a result."""
    return os.path.lexists(_aside(destination))


def settle(destination: Path) -> None:
    """Put a result back that was moved aside, or remove it if the new one is in its place.

    Call it with the destination's lock.
    """
    old = _aside(destination)
    if os.path.lexists(destination):
        remove_folder(old)
    elif has_replaced(destination):
        check_own_folder(old)
        with writing(destination):
            os.rename(old, destination)


def put(folder: Path, destination: Path, *, replaces: bool) -> None:
    """Rename a complete result to the destination.

    Args:
        replaces: whether it takes the place of the result that is there, if one is.
    """
    old = _aside(destination)
    with writing(destination):
        if replaces and os.path.lexists(destination):
            os.rename(destination, old)
        try:
            os.rename(folder, destination)
        except OSError:
            if os.path.lexists(old):
                os.rename(old, destination)
            raise
        sync_folder(destination.parent)
    shutil.rmtree(old, ignore_errors=True)
