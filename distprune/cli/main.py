"""The entry point: runs a command and turns what went wrong into a message and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    from distprune.cli import process

    if arguments is not None:
        sys.exit(process.run(arguments, _run))
    process.end_on_signals()
    process.leave(process.run(sys.argv[1:], _run))


def _run(arguments: Sequence[str]) -> int | None:
    if arguments[:1] == ["selftest"]:  # without typer and rich, which may be missing
        from distprune.cli import selftest

        return selftest.main(arguments[1:])
    try:
        from distprune.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        from distprune.files.errors import SelectionError

        raise SelectionError(
            f"the command line needs {error.name}: pip install 'distprune[cli]' (only selftest "
            "works without)"
        ) from error
    app.run(arguments)
    return None
