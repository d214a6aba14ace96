"""``--discard``: remove what an interrupted run has left."""

from __future__ import annotations

from pathlib import Path

from distprune.cli.console import Terminal
from distprune.files.text import format_size


def discard(terminal: Terminal, destination: Path, take_over: bool) -> None:
    """Remove unfinished results of a destination, and say what they took.

    Args:
        destination: itself stays as it is.
        take_over: from an owner of the lock that cannot be asked.
    """
    if not terminal.is_leader:
        return
    from distprune.files.results.placing import discard

    removed = discard(destination, take_over=take_over)
    if terminal.as_json:
        found = [{"folder": path, "num_bytes": num_bytes} for path, num_bytes in removed]
        terminal.json({"discarded": found})
        return
    for path, num_bytes in removed:
        terminal.text(f"Removed {path}, which took {format_size(num_bytes)} of the disk.")
    if not removed:
        terminal.text(f"There is no unfinished result of {destination}.")
