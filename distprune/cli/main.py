"""The entry point: runs a command and turns what went wrong into a message and an exit code."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # a Ctrl-C while this file is imported would end in a traceback: little is
    from collections.abc import Sequence
    from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit."""
    try:
        from distprune.cli import process

        command_line = sys.argv[1:] if arguments is None else list(arguments)
        process.prepare()
        with process.Ending(command_line, is_process=arguments is None) as ending:
            process.check_memory_limit()
            if command_line[:1] == ["selftest"]:  # without typer and rich, which may be missing
                from distprune.cli import selftest

                ending.code = selftest.main(command_line[1:])
            else:
                try:
                    from distprune.cli import app
                except ModuleNotFoundError as error:
                    if (error.name or "").split(".")[0] not in ("typer", "rich"):
                        raise
                    print(
                        f"distprune: the command line needs {error.name}: pip install "
                        "'distprune[cli]' (only selftest works without)",
                        file=sys.stderr,
                    )
                    ending.code = process.USAGE
                else:
                    ending.code = app.run(command_line)
        code = ending.code
    except KeyboardInterrupt:
        code = 130
        print("distprune: interrupted.", file=sys.stderr)
    except (ImportError, MemoryError, SystemError) as error:  # of this package's own modules
        code = 7
        print(f"distprune: it cannot start: {error or 'out of memory'}", file=sys.stderr)
    sys.exit(code)
