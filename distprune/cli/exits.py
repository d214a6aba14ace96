"""How a command ends: exit codes that scripts can rely on.

torchrun ends with 1 whatever its workers end with; the code is in the report as well.
"""

from __future__ import annotations

OK = 0
INTERNAL = 1  # a defect of distprune
USAGE = 2  # the command, or the recipe
INPUT = 3  # the checkpoint
OUTPUT = 4  # the disk, or what is on it already
DISTRIBUTED = 5  # ranks that differ, or are lost
INTERRUPTED = 130  # SIGINT
TERMINATED = 143  # SIGTERM


class Failure(Exception):
    """A command cannot do what it was asked to; the text says why and what to do.

    Args:
        code: the exit code.
        text: one sentence or more.
    """

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)
