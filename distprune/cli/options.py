"""Options that several commands have, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A folder with safetensors files, such a file, or the name of a model that is in the "
        "local Hugging Face cache (org/name).",
        show_default=False,
    ),
]
Destination = Annotated[
    Path,
    typer.Argument(
        metavar="DST", help="A new folder, created when everything is done.", show_default=False
    ),
]
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
        help="Draw sparsity by layer and kind, and a histogram of magnitudes (needs matplotlib).",
        metavar="FILE.png|svg|pdf",
        show_default=False,
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Share the work among this many processes on this machine.",
        show_default=False,
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Take over the lock of a run that was killed on another machine.",
    ),
]
Discard = Annotated[
    bool,
    typer.Option(
        "--discard", help="Only remove the unfinished result of an interrupted run beside DST."
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1, help="Seconds after which a rank that does not respond is lost."
    ),
]
FollowLinks = Annotated[
    bool,
    typer.Option(
        "--follow-links",
        help="Also copy the targets of links in SRC that are outside of SRC and its Hugging Face "
        "cache.",
    ),
]
