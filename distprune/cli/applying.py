"""``distprune apply``: masks that exist, on another checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from distprune.cli import exits, ranks
from distprune.cli.console import Terminal, count, counted, percent
from distprune.cli.mask_tables import show_masks
from distprune.cli.options import AsJson, Quiet, Verbose
from distprune.cli.planning import Source
from distprune.cli.progress import Meter, Reading
from distprune.cli.pruning import Destination
from distprune.files.errors import Interrupted

MaskFolder = Annotated[
    Path,
    typer.Argument(
        metavar="MASKS",
        help="A pruned checkpoint, or what distprune.save_masks wrote.",
        show_default=False,
    ),
]


def apply(
    masks: MaskFolder,
    source: Source,
    destination: Destination,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Write a copy of a checkpoint with zeros where the masks of another one are zero.

    Names and shapes of the masked tensors have to be those of SRC; the numbers may be others, and
    the dtypes. Everything else is copied as it is. -v lists the tensors.

    [bold]Examples[/bold]

      distprune apply Llama-3.2-1B-50 Llama-3.2-1B-Instruct Instruct-50

      distprune apply masks-of-my-run my-model my-model-pruned
    """
    from distprune.files.applying import Application

    terminal = Terminal(as_json, -1 if quiet else verbose)
    application = Application(masks, source)
    checkpoint = application.checkpoint
    total = checkpoint.num_bytes + sum(other.size for other in checkpoint.others)
    stop = ranks.Stop()
    try:
        with stop.listening(), Meter(terminal) as meter:
            applied = application.write(destination, Reading(meter, total, "write"), stop)
    except Interrupted as error:
        error.exit_code = stop.code or exits.TERMINATED
        raise
    if as_json:
        terminal.json({"source": str(source), "masks": str(masks), **asdict(applied)})
        return
    show_masks(terminal, destination)
    terminal.text(
        f"{destination}: the masks prune {count(applied.num_pruned)} of "
        f"{count(applied.num_elements)} elements "
        f"({percent(applied.num_pruned, applied.num_elements)}) in "
        f"{counted(applied.num_tensors, 'tensor')}; "
        f"{count(applied.num_zeroed)} of them were not zero before."
    )
