"""Messages about the folder that a command reads, and its option."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distprune.cli.console import Terminal

if TYPE_CHECKING:
    from distprune.files.checkpoints.checkpoint import Checkpoint

FollowLinks = Annotated[
    bool,
    typer.Option(
        "--follow-links",
        help="Also copy the targets of links in SRC that are outside of SRC and its Hugging Face "
        "cache.",
    ),
]


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
