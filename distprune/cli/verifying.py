"""``distprune verify``: a pruned checkpoint against its source."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from distprune.cli import exits
from distprune.cli.console import Terminal, count, percent, size
from distprune.cli.mask_tables import show_masks
from distprune.cli.options import AsJson, Quiet, Verbose

Pruned = Annotated[
    Path, typer.Argument(metavar="DST", help="What prune wrote, with masks.", show_default=False)
]
Against = Annotated[
    Path,
    typer.Option("--against", metavar="SRC", help="Its source.", show_default=False),
]


def verify(
    pruned: Pruned,
    against: Against,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Check a pruned checkpoint against its source, byte by byte.

    Every byte that was not pruned is that of the source, exactly as many elements are pruned as the
    recipe says, and none of them comes after a kept one in the order of scores. Ends with 3, and
    a list of what is wrong, if not. With -v it lists every tensor and how sparse it is.

    [bold]Example[/bold]

      distprune verify Llama-3.2-1B-50 --against Llama-3.2-1B
    """
    from distprune.files.verifying import verify as check

    terminal = Terminal(as_json, -1 if quiet else verbose)
    found = check(pruned, against)
    if as_json:
        terminal.json({"is_good": found.is_good, **asdict(found)})
    elif found.is_good:
        show_masks(terminal, pruned)
        terminal.text(
            f"{pruned} is what its recipe makes of {against}: {size(found.num_bytes)} compared, "
            f"{count(found.num_pruned)} of {count(found.num_elements)} elements pruned "
            f"({percent(found.num_pruned, found.num_elements)})."
        )
    else:
        for problem in found.problems:
            terminal.text(problem)
    if not found.is_good:
        raise typer.Exit(exits.INPUT)
