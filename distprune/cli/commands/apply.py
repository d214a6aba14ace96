"""``distprune apply``: the masks of one checkpoint on another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distprune.cli import exits, folders, ranks, starting
from distprune.cli.console import Terminal, count, counted, percent
from distprune.cli.folders import show_masks
from distprune.cli.options import (
    AsJson,
    Destination,
    Discard,
    FollowLinks,
    Nproc,
    Quiet,
    Source,
    TakeOver,
    Timeout,
    Verbose,
)
from distprune.cli.progress import Meter

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.applying import Application, Applied
    from distprune.files.checkpoints.checkpoint import Checkpoint

MaskFolder = Annotated[
    Path,
    typer.Argument(
        metavar="MASKS",
        help="A pruned checkpoint, or what distprune.save_masks wrote.",
        show_default=False,
    ),
]


def apply(
    context: typer.Context,
    masks: MaskFolder,
    source: Source,
    destination: Destination,
    follow_links: FollowLinks = False,
    nproc: Nproc = None,
    timeout: Timeout = 600.0,
    take_over: TakeOver = False,
    discard: Discard = False,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Write a copy of a checkpoint with zeros where the masks of another one are zero.

    The masked tensors must have the names and shapes of those in SRC; values and dtypes may differ.
    Everything else is copied as it is. DST/distprune holds the masks and the report. After an
    interruption of any kind, the same command continues where the last one stopped. -v lists the
    tensors.

    [bold]Examples[/bold]

      distprune apply Llama-3.2-1B-50 Llama-3.2-1B-Instruct Instruct-50

      distprune apply masks-of-my-run my-model my-model-pruned --nproc 4
    """
    verbosity = -1 if quiet else verbose
    terminal = Terminal(as_json, verbosity, is_leader=ranks.is_leader())
    if discard:
        folders.discard(terminal, destination, take_over)
        return

    def find() -> Application:
        from distprune.files.applying import Application

        return Application(masks, source, follow_links=follow_links)

    starting.run_on_ranks(context, nproc, find)
    stop = exits.Stop()
    # Listen before the ranks meet: a signal to all of them must not end some of them at once.
    with stop.listening(), ranks.process_group(timeout):
        checkpoint, applied = _apply(terminal, find, destination, stop, take_over)
    if as_json:
        values = {"source": checkpoint.folder, "masks": str(masks), **asdict(applied)}
        terminal.json({**values, **folders.as_values(checkpoint)})
        return
    show_masks(terminal, destination)
    terminal.text(
        f"{destination}: the masks prune {count(applied.num_pruned)} of "
        f"{count(applied.num_elements)} elements "
        f"({percent(applied.num_pruned, applied.num_elements)}) in "
        f"{counted(applied.num_tensors, 'tensor')}; "
        f"{count(applied.num_zeroed)} of them were not zero before."
    )


def _apply(
    terminal: Terminal,
    find: Callable[[], Application],
    destination: Path,
    stop: exits.Stop,
    take_over: bool,
) -> tuple[Checkpoint, Applied]:
    from distprune._common.process_groups import world
    from distprune.files.team import Team

    application = Team(world()).attempt(find)
    folders.tell(terminal, application.checkpoint)
    with Meter(terminal) as meter:
        applied = application.write(
            destination, progress=meter, stop=stop, take_over=take_over, tell=terminal.note
        )
    return application.checkpoint, applied
