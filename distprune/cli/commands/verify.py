"""``distprune verify``: a pruned checkpoint against its source."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from distprune.cli import exits, ranks
from distprune.cli.console import Terminal, count, percent, size
from distprune.cli.mask_tables import show_masks
from distprune.cli.options import AsJson, Nproc, Quiet, Timeout, Verbose
from distprune.cli.progress import Meter
from distprune.files.errors import Interrupted

Pruned = Annotated[
    Path, typer.Argument(metavar="DST", help="What prune wrote, with masks.", show_default=False)
]
Against = Annotated[
    Path,
    typer.Option("--against", metavar="SRC", help="Its source.", show_default=False),
]


def verify(
    context: typer.Context,
    pruned: Pruned,
    against: Against,
    nproc: Nproc = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Check a pruned checkpoint against its source, byte by byte.

    DST has the files that prune writes, and no others. Every byte that was not pruned is that of
    the source, exactly as many elements are pruned as the recipe says, and none of them comes after
    a kept one in the order of scores. Every number of the report is derived again. Ends with
    3, and a list of what is wrong, if not. With -v it lists every tensor and how sparse it is.

    [bold]Examples[/bold]

      distprune verify Llama-3.2-1B-50 --against Llama-3.2-1B

      distprune verify Llama-3.2-1B-50 --against Llama-3.2-1B --nproc 4
    """
    if nproc is not None:
        if ranks.is_rank():
            raise typer.BadParameter("torchrun has started the processes already; leave it out.")
        raise typer.Exit(ranks.start_ranks(ranks.without_option(context.obj, "--nproc"), nproc))
    from distprune.files.verifying import verify as check

    terminal = Terminal(as_json, -1 if quiet else verbose, is_leader=ranks.is_leader())
    stop = ranks.Stop()
    try:
        with stop.listening(), ranks.process_group(timeout), Meter(terminal) as meter:
            found = check(pruned, against, progress=meter, stop=stop)
    except Interrupted as error:
        error.exit_code = stop.code or exits.TERMINATED
        raise
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
