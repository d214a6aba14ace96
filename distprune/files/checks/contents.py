"""The names and sizes of a pruned checkpoint's files, compared with a folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distprune.files.checkpoints.checkpoint import SourceFile
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskLayout
from distprune.files.partial import RECIPE_FILE
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan
from distprune.files.reports.report import REPORT_FILE, RUN_FILE
from distprune.files.text import printable


@dataclass(frozen=True)
class Contents:
    """How a folder differs from the expected files.

    Attributes:
        problems: a sentence for each file that is missing, unexpected or unreadable, or has another
            size; in the order of names.
        bad: names of expected files whose content cannot be compared.
    """

    problems: tuple[str, ...]
    bad: frozenset[str]


def expected_sizes(plan: Plan, layout: MaskLayout) -> dict[str, int | None]:
    """By name of each file of a result, its size; None if the size may vary."""
    files: list[SourceFile] = [*plan.checkpoint.files, *plan.copied]
    sizes: dict[str, int | None] = {file.name: file.size for file in files}
    if plan.has_card:
        sizes[CARD_FILE] = None
    if plan.inputs.statistics is not None:
        sizes[STATISTICS_FILE] = None
    return sizes | {MASK_FILE: layout.size, REPORT_FILE: None, RUN_FILE: None, RECIPE_FILE: None}


def look_through(folder: str | Path, sizes: Mapping[str, int | None]) -> Contents:
    """Compare the names and sizes of all files in a folder with those that are expected.

    Links to files are read through, and so are links to folders in which a file is expected.
    No file is opened that is not a regular one.

    Args:
        folder: of the result.
        sizes: from :func:`expected_sizes`.

    Cost: a few system calls per file.
    """
    problems: dict[str, str] = {}
    bad = set()
    for name, size in sizes.items():
        problem = _problem(os.path.join(folder, name), size)
        if problem:
            problems[name] = f"{printable(name)} {problem}"
            bad.add(name)
    parents = {str(parent) for name in sizes for parent in Path(name).parents}
    pending = [""]
    while pending:
        inner = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(folder, inner)))
        except OSError as error:
            if inner in ("", *parents):
                problems[inner] = (
                    f"{printable(inner) or folder} cannot be listed: {error.strerror}."
                )
            continue
        for entry in entries:
            name = os.path.join(inner, entry.name)
            if name in sizes:
                continue
            if name in parents:
                pending.append(name)
                continue
            what = "folder" if _is_folder(entry) else "file"
            problems[name] = f"{printable(name)} is a {what} that prune did not write."
    return Contents(tuple(problems[name] for name in sorted(problems)), frozenset(bad))


def _problem(path: str, size: int | None) -> str:
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            return "is not a regular file."
        if size is not None and info.st_size != size:
            return f"has {info.st_size} bytes; expected {size}."
        with open(path, "rb"):
            return ""
    except FileNotFoundError:
        return "is missing."
    except OSError as error:
        return f"cannot be read: {error.strerror}."


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
