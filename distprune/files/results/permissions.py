"""Permissions of results: those of the source, less the umask."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Iterable
from pathlib import Path

from distprune.files.formats.header import WeightFile


def make_folders(folders: Iterable[tuple[str, int]], folder: Path) -> None:
    """Make a folder and its subfolders with the permissions of the source's, less the umask.

    Existing folders stay as they are. The owner always has full access.

    Args:
        folders: (name, permissions), sorted, so that a folder precedes its subfolders; "" is
            ``folder`` itself.

    Raises:
        OSError: a folder cannot be made.
    """
    for name, mode in folders:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder / name, mode | 0o700)


def mask_mode(files: Iterable[WeightFile]) -> int:
    """Permissions of the mask file: those that all weight files have in common."""
    return functools.reduce(operator.and_, (file.mode for file in files), 0o666)


def top_mode(folders: Iterable[tuple[str, int]]) -> int:
    """Permissions of the result folder itself, less the umask.

    Args:
        folders: as for :func:`make_folders`.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    return (dict(folders).get("", 0o777) & ~umask) | 0o700
