"""Pointers of git-lfs, which a clone without git-lfs has in place of large files."""

from __future__ import annotations

from distprune.files.errors import CheckpointError

_START = b"version https://git-lfs"
HEAD_BYTES = len(_START)


def check_no_pointer(head: bytes, name: str) -> None:
    """Raise CheckpointError if a file is a git-lfs pointer.

    Args:
        head: the first ``HEAD_BYTES`` bytes of the file, or more.
        name: of the file, for the message.
    """
    if head.startswith(_START):
        raise CheckpointError(
            f"{name} is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder."
        )
