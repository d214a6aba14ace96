"""Write the help of every command as Markdown, for docs/command_line.md.

python docs/help_of_commands.py

The build of the documentation runs it (hooks.py), so that the page cannot differ from the program.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

WIDTH = 78
COMMANDS = (
    "plan", "prune", "apply", "inspect", "verify", "diff",
    "eval", "calibrate",
    "recipe ls", "recipe show", "selftest",
)  # fmt: skip


def help_of(command: str) -> str:
    """What ``distprune COMMAND --help`` prints to a pipe."""
    from distprune.cli import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    lines = (line.rstrip() for line in output.getvalue().splitlines())
    return "\n".join(lines).strip("\n")


def as_markdown() -> str:
    """A section for every command."""
    return "\n".join(
        f"## distprune {command}\n\n```text\n{help_of(command)}\n```\n" for command in COMMANDS
    )


def main() -> None:
    os.environ |= {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    sys.stdout.write(as_markdown())


if __name__ == "__main__":
    main()
