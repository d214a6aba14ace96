"""The command line: ``distprune`` and ``python -m distprune``.

Click reads the arguments, rich shows progress; the work is done by ``distprune.files``. Modules
here import torch, and whatever imports it, only inside the commands that need it. ``main`` turns
what went wrong into a message and an exit code: 0 done, 1 failure, 2 wrong usage or recipe, 3
checkpoints that differ.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from distprune.files.errors import SelectionError, explained, printable

_OF_THE_EXTRA = ("click", "rich", "pydantic", "yaml")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for encodings that lack characters
    try:
        if arguments[:1] == ["selftest"]:  # without click and rich, which may be missing
            try:
                from distprune import selftest
            except ImportError as error:
                sys.exit(f"FAILED: distprune cannot be imported: {error}")
            sys.exit(selftest.main(arguments[1:]))
        from distprune.cli.app import app

        app(args=list(arguments), prog_name="distprune")
    except Exception as error:
        explanation = explained(error)
        if isinstance(error, ModuleNotFoundError) and error.name in _OF_THE_EXTRA:
            explanation = SelectionError(
                f"the command line needs {error.name}: pip install 'distprune[cli]' (only selftest "
                "works without)"
            )
        if explanation is None:
            raise
        # An indent shows that a line continues the message: names may have line breaks.
        text = str(explanation).replace("\n  - ", "\n- ").replace("\n", "\n  ")
        print("distprune:", "\n".join(map(printable, text.split("\n"))), file=sys.stderr)
        sys.exit(explanation.exit_code)
