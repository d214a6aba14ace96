"""The entry point: runs a command and turns what went wrong into a message and an exit code."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from distprune.cli import exits, selftesting

_DEFECT = (
    "this is a defect of distprune. Please report it, with the lines above and the output of "
    "`distprune env`."
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):  # names of files need not be text
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if given[:1] == ["selftest"]:  # without typer and rich, which may not be installed
        sys.exit(selftesting.main(given[1:]))
    try:
        from distprune.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        print(
            f"distprune: the command line needs {error.name}: pip install 'distprune[cli]' "
            "(only selftest works without)",
            file=sys.stderr,
        )
        sys.exit(exits.USAGE)
    try:
        # Exits by itself: with 0, or with 2 if misused.
        app(args=given, prog_name="distprune", obj=given)
    except Exception as error:
        sys.exit(_report(error, as_json="--json" in given))


def _report(error: Exception, *, as_json: bool) -> int:
    """Say what went wrong, once for all ranks if they all know it; the exit code."""
    from distprune.cli.ranks import is_leader
    from distprune.files.errors import FilesError

    code, text = exits.INTERNAL, _DEFECT
    if isinstance(error, FilesError):
        code, text = error.exit_code, str(error)
    if code == exits.INTERNAL:
        traceback.print_exception(error)
    elif not is_leader() and code != exits.DISTRIBUTED:
        return code
    if as_json and is_leader():
        print(json.dumps({"exit_code": code, "error": text}))
    print(f"distprune: {text}", file=sys.stderr)
    return code
