"""Options that several commands have, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write errors only to stderr.")]
Verbose = Annotated[
    int,
    typer.Option("--verbose", "-v", count=True, help="List every tensor.", show_default=False),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Draw sparsity by tensor and a histogram of magnitudes (needs matplotlib).",
        metavar="FILE.png",
        show_default=False,
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1, help="Seconds after which a rank that does not answer is lost."
    ),
]
