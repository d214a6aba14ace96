"""``distprune convert``: a pickled checkpoint as safetensors."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from distprune.cli import exits, folders
from distprune.cli.console import Terminal, counted
from distprune.cli.options import AsJson, Destination, FollowLinks, Quiet, Verbose
from distprune.cli.progress import Meter, Reading
from distprune.files.text import format_size

Pickled = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="A folder with pytorch_model.bin (or shards of it), a file of torch.save, or the name "
        "of a model that is in the local Hugging Face cache.",
        show_default=False,
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
    folders.tell_skipped(terminal, conversion.skipped)
    stop = exits.Stop()
    with stop.listening(), Meter(terminal) as meter:
        reading = Reading(meter, conversion.total_bytes, "write")
        converted = conversion.write(destination, reading, stop)
    for note in converted.notes:
        terminal.note(note)
    for names in converted.tied:
        terminal.note(f"One tensor, written under each of its names: {', '.join(names)}.")
    left = [name for name in converted.copied if is_weights(name)]
    folders.tell_names(terminal, "Copied, not converted", left)
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
