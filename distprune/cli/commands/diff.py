"""``distprune diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distprune.cli import exits
from distprune.cli.console import Terminal, count, percent
from distprune.cli.options import AsJson, Quiet, Verbose
from distprune.cli.progress import Meter, Reading

if TYPE_CHECKING:
    from distprune.files.inspecting import TensorDifference

First = Annotated[Path, typer.Argument(metavar="A", help="A checkpoint.", show_default=False)]
Second = Annotated[Path, typer.Argument(metavar="B", help="Another one.", show_default=False)]


def diff(
    first: First,
    second: Second,
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help=f"Exit with {exits.DIFFERENT} if there is a difference, else with 0.",
        ),
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints tensor by tensor: values, and which elements are zero.

    Names, shapes, dtypes and the metadata of the headers are compared too. The tensors may be in
    different files; files without weights are not compared. Tensors that are equal bit for bit are
    listed only with -v.

    [bold]Examples[/bold]

      distprune diff Llama-3.2-1B-50 Llama-3.2-1B-50-tuned

      distprune diff --exit-code A B && echo equal
    """
    from distprune.files.checkpoints.checkpoint import open_checkpoint
    from distprune.files.inspecting import compare, compare_metadata

    a, b = (open_checkpoint(path, follow_links=True) for path in (first, second))
    terminal = Terminal(as_json, -1 if quiet else verbose)
    with Meter(terminal) as meter:
        reading = Reading(meter, a.num_bytes + b.num_bytes)
        tensors = list(compare(a, b, reading))
    metadata = compare_metadata(a, b)
    are_equal = all(tensor.is_equal for tensor in tensors) and not metadata
    if as_json:
        values = [{**asdict(tensor), "is_equal": tensor.is_equal} for tensor in tensors]
        texts = {key: {"first": one, "second": two} for key, (one, two) in metadata.items()}
        terminal.json({"are_equal": are_equal, "metadata": texts, "tensors": values})
    else:
        _show_differences(terminal, tensors, metadata, with_equal=verbose > 0)
    if exit_code and not are_equal:
        raise typer.Exit(exits.DIFFERENT)


def _show_differences(
    terminal: Terminal,
    tensors: list[TensorDifference],
    metadata: Mapping[str, tuple[Sequence[str], Sequence[str]]],
    *,
    with_equal: bool,
) -> None:
    rows = [
        (tensor.name, tensor.problem, "", "", "", "")
        if tensor.problem
        else (
            tensor.name,
            "equal"
            if tensor.is_equal
            else f"differs in {percent(tensor.num_differing, tensor.numel)}",
            count(tensor.num_differing),
            count(tensor.num_zero_in_both),
            count(tensor.num_zero_in_first),
            count(tensor.num_zero_in_second),
        )
        for tensor in tensors
        if with_equal or not tensor.is_equal
    ]
    numbers = ("elements that differ", "zero in both", "zero in A only", "zero in B only")
    if rows:
        terminal.table(("tensor", "values", *numbers), rows, right=numbers)
        terminal.text()
    for key, values in metadata.items():
        one, two = (", ".join(map(ascii, texts)) or "none" for texts in values)
        terminal.text(f"Metadata differ: {ascii(key)[1:-1]}: {one} in A, {two} in B.")
    num_equal = sum(tensor.is_equal for tensor in tensors)
    terminal.text(f"{num_equal} of {len(tensors)} tensors are equal bit for bit.")
