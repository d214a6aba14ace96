"""What commands say about the folders that they read, write and discard."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune.cli.console import Terminal, count, percent
from distprune.files.text import format_size

if TYPE_CHECKING:
    from distprune.files.checkpoints.checkpoint import Checkpoint


def tell(terminal: Terminal, checkpoint: Checkpoint) -> None:
    """Write to stderr where the checkpoint was found and which files are not copied or pruned."""
    if checkpoint.note:
        terminal.note(checkpoint.note)
    tell_skipped(terminal, checkpoint.skipped)
    tell_names(terminal, "Copied, not pruned", checkpoint.unpruned_weights)


def tell_names(terminal: Terminal, what: str, names: Collection[str]) -> None:
    """Write a line with the names of files, if there are any."""
    if names:
        terminal.note(f"{what}: {_listed(names)}.")


def tell_skipped(terminal: Terminal, skipped: Iterable[tuple[str, str]]) -> None:
    """Write a line with the names of files for each reason not to copy them."""
    reasons: dict[str, list[str]] = {}
    for name, reason in skipped:
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        terminal.note(f"Not copied: {_listed(names)} ({reason}).")


def as_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """The files that are copied, not pruned and not copied, for JSON."""
    return {
        "copied": [file.name for file in checkpoint.others],
        "copied_not_pruned": list(checkpoint.unpruned_weights),
        "not_copied": dict(checkpoint.skipped),
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def discard(terminal: Terminal, destination: Path, take_over: bool) -> None:
    """Remove the unfinished results of a destination, and write how large they were."""
    if not terminal.is_leader:
        return
    from distprune.files.partial import discard

    removed = discard(destination, take_over=take_over)
    if terminal.as_json:
        folders = [{"folder": path, "num_bytes": num_bytes} for path, num_bytes in removed]
        terminal.json({"discarded": folders})
        return
    for path, num_bytes in removed:
        terminal.text(f"Removed {path}, which took {format_size(num_bytes)} of the disk.")
    if not removed:
        terminal.text(f"There is no unfinished result of {destination}.")


_CHUNK = 1 << 20  # elements; a multiple of 8


def show_masks(terminal: Terminal, folder: Path) -> None:
    """Write a table of the tensors that have a mask, with ``-v`` only.

    Cost: one read of the masks.
    """
    if terminal.verbosity < 1 or terminal.as_json:
        return
    import numpy as np

    from distprune.files.checkpoints.mask_files import open_masks, read_keep
    from distprune.files.disk.access import OpenFiles

    masks, files, rows = open_masks(folder), OpenFiles(os.O_RDONLY), []
    try:
        for name, shape in masks.shapes.items():
            numel = math.prod(shape)
            num_kept = 0
            for first in range(0, numel, _CHUNK):
                last = min(first + _CHUNK, numel)
                num_kept += int(np.count_nonzero(read_keep(masks, files, name, first, last)))
            num_pruned = numel - num_kept
            rows.append((name, count(numel), count(num_pruned), percent(num_pruned, numel)))
    finally:
        files.close()
    numbers = ("elements", "pruned", "sparsity")
    terminal.table(("tensor", *numbers), rows, right=numbers)
