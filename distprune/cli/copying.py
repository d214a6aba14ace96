"""``distprune apply`` and ``convert``: copies that no recipe decides on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distprune.cli import process, ranks
from distprune.cli.console import Meter, Reading, Terminal, count, counted, percent
from distprune.cli.describing import (
    as_values,
    discard_unfinished,
    show_counts,
    tell,
    tell_names,
    tell_skipped,
)
from distprune.cli.options import (
    AsJson,
    Destination,
    Discard,
    FollowLinks,
    Force,
    Nproc,
    Quiet,
    Source,
    TakeOver,
    Timeout,
    Verbose,
    argument,
)
from distprune.files.text import format_size

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.applying import Application, Applied
    from distprune.files.checkpoints.checkpoint import Checkpoint


MaskFolder = Annotated[
    Path, argument("MASKS", "A pruned checkpoint, or what distprune.save_masks wrote.")
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
    force: Force = False,
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
    terminal = Terminal(as_json, verbosity, is_leader=process.is_leader())
    if discard:
        discard_unfinished(terminal, destination, take_over)
        return

    def find() -> Application:
        from distprune.files.applying import Application

        return Application(masks, source, follow_links=follow_links)

    ranks.run_on_ranks(context, nproc, find)
    # Listen before the ranks meet: a signal to all of them must not end some of them at once.
    with process.Stop() as stop, ranks.process_group(timeout):
        checkpoint, applied = _apply(terminal, find, destination, stop, take_over, force)
    if as_json:
        values = {"source": checkpoint.folder, "masks": str(masks), **asdict(applied)}
        del values["tensors"]
        terminal.json({**values, **as_values(checkpoint)})
        return
    if verbose:
        show_counts(terminal, applied.tensors)
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
    stop: process.Stop,
    take_over: bool,
    force: bool,
) -> tuple[Checkpoint, Applied]:
    from distprune._common.process_groups import world
    from distprune.files.team import Team

    application = Team(world()).attempt(find)
    tell(terminal, application.checkpoint)
    with Meter(terminal) as meter:
        applied = application.write(
            destination,
            progress=meter,
            stop=stop,
            take_over=take_over,
            replace=force,
            tell=terminal.note,
        )
    return application.checkpoint, applied


Pickled = Annotated[
    Path,
    argument(
        "SRC",
        "A folder with pytorch_model.bin (or shards of it), a file of torch.save, or the name of a "
        "model that is in the local Hugging Face cache.",
    ),
]


def convert(
    source: Pickled,
    destination: Destination,
    follow_links: FollowLinks = False,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Write a pickled checkpoint (pytorch_model.bin, *.pt, *.pth) as safetensors.

    Every tensor keeps its name, dtype and bits, including heads and tied weights; no model is
    built. Shards stay shards, and all other files are copied. No code in a pickle is run: a file
    that contains more than tensors is refused.

    [bold]Examples[/bold]

      distprune convert bert-base-pickled bert-base

      distprune convert run-7/model.pt run-7-safetensors
    """
    from distprune.files.checkpoints.locating import is_weights
    from distprune.files.converting import Conversion

    terminal = Terminal(as_json, -1 if quiet else verbose)
    conversion = Conversion(source, follow_links=follow_links)
    if conversion.note:
        terminal.note(conversion.note)
    tell_skipped(terminal, conversion.skipped)
    with process.Stop() as stop, Meter(terminal) as meter:
        reading = Reading(meter, conversion.total_bytes, "write")
        converted = conversion.write(destination, reading, stop)
    for note in converted.notes:
        terminal.note(note)
    for names in converted.tied:
        terminal.note(f"One tensor, written under each of its names: {', '.join(names)}.")
    left = [name for name in converted.copied if is_weights(name)]
    tell_names(terminal, "Copied, not converted", left)
    if as_json:
        values = {"source": conversion.folder, **asdict(converted)}
        terminal.json({**values, "copied_not_converted": left})
        return
    files = counted(len(converted.files), "safetensors file")
    terminal.text(
        f"{destination}: {counted(converted.num_tensors, 'tensor')} "
        f"({format_size(converted.num_bytes)}) in {files}, "
        f"{counted(len(converted.copied), 'other file')} copied."
    )
