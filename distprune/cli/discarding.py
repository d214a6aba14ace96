"""``--discard``: remove the unfinished result of an interrupted run."""

from __future__ import annotations

from pathlib import Path

from distprune.cli.console import Terminal
from distprune.files.text import format_size


def discard(terminal: Terminal, destination: Path, take_over: bool) -> None:
    """Remove the unfinished results of a destination, and write how large they were.

    Args:
        terminal: of this rank.
        destination: stays as it is.
        take_over: whether to ignore a lock whose owner is on another machine.
    """
    if not terminal.is_leader:
        return
    from distprune.files.results.placing import discard

    removed = discard(destination, take_over=take_over)
    if terminal.as_json:
        folders = [{"folder": path, "num_bytes": num_bytes} for path, num_bytes in removed]
        terminal.json({"discarded": folders})
        return
    for path, num_bytes in removed:
        terminal.text(f"Removed {path}, which took {format_size(num_bytes)} of the disk.")
    if not removed:
        terminal.text(f"There is no unfinished result of {destination}.")
