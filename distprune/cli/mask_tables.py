"""The table of masks that ``-v`` shows: the sparsity of each tensor."""

from __future__ import annotations

import math
import os
from pathlib import Path

from distprune.cli.console import Terminal, count, percent

_CHUNK = 1 << 20  # elements; a multiple of 8


def show_masks(terminal: Terminal, folder: Path) -> None:
    """Write a table of the tensors that have a mask, with ``-v`` only.

    Args:
        terminal: of this rank.
        folder: a checkpoint that was pruned, with masks.

    Raises:
        CheckpointError: the masks cannot be read.

    Cost: one read of the masks.
    """
    if terminal.verbosity < 1 or terminal.as_json:
        return
    import numpy as np

    from distprune.files.checkpoints.mask_files import open_masks, read_keep
    from distprune.files.disk.open_files import OpenFiles

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
