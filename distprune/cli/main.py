"""The entry point: runs a command and turns what went wrong into a message and an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from distprune.cli import exits


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    try:
        from distprune.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"distprune: the command line needs {error.name}: pip install 'distprune[cli]'",
            file=sys.stderr,
        )
        sys.exit(exits.USAGE)
    try:
        app(args=arguments, prog_name="distprune")  # exits by itself: 0, or 2 if misused
    except exits.Failure as error:
        failure = error
    except Exception as error:
        failure = _failure(error)
    if "--json" in (sys.argv[1:] if arguments is None else arguments):
        print(json.dumps({"exit_code": failure.code, "error": str(failure)}))
    print(f"distprune: {failure}", file=sys.stderr)
    sys.exit(failure.code)


def _failure(error: Exception) -> exits.Failure:
    """What an exception means to a user."""
    from distprune.files.errors import FilesError

    if isinstance(error, FilesError):
        return exits.Failure(error.exit_code, str(error))
    import traceback

    traceback.print_exception(error)
    return exits.Failure(
        exits.INTERNAL,
        "this is a defect of distprune. Please report it, with the lines above and the output of "
        "`distprune env`.",
    )
