"""``distprune verify``: a pruned checkpoint against its source."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from distprune.cli import exits, ranks, starting
from distprune.cli.console import Terminal, count, percent
from distprune.cli.folders import show_masks
from distprune.cli.options import AsJson, Nproc, Quiet, Timeout, Verbose
from distprune.cli.progress import Meter
from distprune.files.text import format_size

Pruned = Annotated[
    Path, typer.Argument(metavar="DST", help="What prune wrote, with masks.", show_default=False)
]
Against = Annotated[
    Path,
    typer.Option("--against", metavar="SRC", help="Its source.", show_default=False),
]

Scores = Annotated[
    Path | None,
    typer.Option(
        "--scores",
        metavar="FOLDER",
        help="The scores that it was ranked by, if they were given.",
        show_default=False,
    ),
]


def verify(
    context: typer.Context,
    pruned: Pruned,
    against: Against,
    scores: Scores = None,
    nproc: Nproc = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Check a pruned checkpoint against its source, byte by byte.

    DST must have the files that prune writes and no others. Every byte that was not pruned must
    equal that of the source, exactly as many elements must be pruned as the recipe says, and none
    of them may come after a kept one in the order of scores. Every number of the report is derived
    again. If anything is wrong, it is listed and the exit code is 3. -v lists every tensor with its
    sparsity.

    [bold]Examples[/bold]

      distprune verify Llama-3.2-1B-50 --against Llama-3.2-1B

      distprune verify Llama-3.2-1B-50 --against Llama-3.2-1B --nproc 4
    """
    starting.run_on_ranks(context, nproc)
    from distprune.files.verifying import verify as check

    terminal = Terminal(as_json, -1 if quiet else verbose, is_leader=ranks.is_leader())
    stop = exits.Stop()
    with stop.listening(), ranks.process_group(timeout), Meter(terminal) as meter:
        result = check(pruned, against, scores=scores, progress=meter, stop=stop)
    if as_json:
        terminal.json({"is_good": result.is_good, **asdict(result)})
    elif result.is_good:
        show_masks(terminal, pruned)
        terminal.text(
            f"{pruned} is what its recipe makes of {against}: {format_size(result.num_bytes)} "
            f"compared, {count(result.num_pruned)} of {count(result.num_elements)} elements pruned "
            f"({percent(result.num_pruned, result.num_elements)})."
        )
    else:
        for problem in result.problems:
            terminal.text(problem)
    if not result.is_good:
        raise typer.Exit(exits.INPUT)
