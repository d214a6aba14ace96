"""Options that several commands have, each described once."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write errors only to stderr.")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="Say more on stderr.", show_default=False)
]
