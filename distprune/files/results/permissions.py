"""Permissions of results: those of the source, less the umask, so that nothing private is shown."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Iterable
from pathlib import Path

from distprune.files.formats.header import WeightFile


def make_folders(folders: Iterable[tuple[str, int]], folder: Path) -> None:
    """Make a folder, and those in it, with the permissions of the source's, less the umask.

    Those that are there stay as they are. The owner may always work in them.

    Args:
        folders: (name, permissions), sorted, so that a folder comes before those in it; "" is
            ``folder`` itself.

    Raises:
        OSError: one cannot be made.
    """
    for name, mode in folders:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder / name, mode | 0o700)


def mask_mode(files: Iterable[WeightFile]) -> int:
    """Permissions of the masks: whoever may read all of the weights may read them."""
    return functools.reduce(operator.and_, (file.mode for file in files), 0o666)


def top_mode(folders: Iterable[tuple[str, int]]) -> int:
    """Permissions of the result's own folder, the umask taken off.

    Args:
        folders: as for :func:`make_folders`.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    return (dict(folders).get("", 0o777) & ~umask) | 0o700
