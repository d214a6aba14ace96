"""``distprune apply``, ``verify`` and ``diff``: a checkpoint beside another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import Field

from distprune.cli import process
from distprune.cli.console import Meter, Terminal, count, counted, percent, share_text
from distprune.cli.describing import discard_unfinished, note_files, show_counts, values_of_files
from distprune.cli.options import (
    Options,
    OutputOptions,
    WritingOptions,
    command,
    destination,
    made,
    source,
)
from distprune.files.text import format_size

if TYPE_CHECKING:
    from distprune.files.applying import Application
    from distprune.files.inspecting import TensorDifference


@command("apply", WritingOptions, OutputOptions)
@click.argument("masks", metavar="MASKS", type=Path)
@source
@destination
def apply(context: click.Context, masks: Path, source: Path, destination: Path) -> None:
    """Write a copy of a checkpoint SRC with zeros where the masks of another one are zero.

    MASKS is a pruned checkpoint, or what distprune.save_masks wrote.

    The masked tensors must have the names and shapes of those in SRC; values and dtypes may differ.
    Everything else is copied as it is. DST/distprune holds the masks and the report. After an
    interruption the same command continues.

    \b
    distprune apply Llama-3.2-1B-50 Llama-3.2-1B-Instruct Instruct-50
    """
    output, writing = made(context, OutputOptions), made(context, WritingOptions)
    terminal = output.terminal()
    if writing.discard:
        discard_unfinished(terminal, destination)
        return

    def find() -> Application:
        from distprune.files.applying import Application

        return Application(masks, source)

    with process.on_ranks(writing.timeout, find) as application:
        checkpoint = application.checkpoint
        note_files(terminal, checkpoint)
        with Meter(terminal) as meter:
            report = application.write(
                destination,
                progress=meter.files,
                replace=writing.force,
                tell=terminal.note,
            )
    tensors = [(t["name"], t["num_elements"], t["num_pruned"]) for t in report["tensors"]]
    counts = {name: report[name] for name in ("num_elements", "num_pruned", "num_zeroed")}
    if output.as_json:
        values = {"source": checkpoint.folder, "masks": str(masks), **counts}
        terminal.json({**values, "num_tensors": len(tensors), **values_of_files(checkpoint)})
        return
    if output.verbose:
        show_counts(terminal, tensors)
    num_elements, num_pruned, num_zeroed = counts.values()
    terminal.text(
        f"{destination}: the masks prune {share_text(num_pruned, num_elements)} in "
        f"{counted(len(tensors), 'tensor')}; "
        f"{count(num_zeroed)} of them were not zero before."
    )


class VerifyingOptions(Options):
    """The options of verify alone."""

    scores: Path | None = Field(
        default=None, description="Scores that it was ranked by, if they were given."
    )
    timeout: float = Field(
        default=600.0, ge=1, description="Seconds after which a silent rank is lost (600)."
    )


@command("verify", VerifyingOptions, OutputOptions)
@click.argument("pruned", metavar="DST", type=Path)
@click.option("--against", metavar="SRC", type=Path, required=True, help="Its source.")
def verify(context: click.Context, pruned: Path, against: Path) -> None:
    """Check a pruned checkpoint against its source, byte by byte.

    The source is ranked again by the recipe: the masks must be the same, and every byte that was
    not pruned must equal that of the source. If anything is wrong, it is listed, and the exit code
    is 3. The order of a pruning in rounds is not known, and not compared.

    \b
    distprune verify Llama-3.2-1B-50 --against Llama-3.2-1B
    """
    output, given = made(context, OutputOptions), made(context, VerifyingOptions)
    from distprune.files.reports import read_report
    from distprune.files.verifying import verify as check

    terminal = output.terminal()
    with process.process_group(given.timeout), Meter(terminal) as meter:
        result = check(pruned, against, scores=given.scores, progress=meter.files)
    if output.as_json:
        terminal.json({"is_good": result.is_good, **asdict(result)})
    elif result.is_good:
        if output.verbose:
            tensors = read_report(pruned).tensors
            show_counts(terminal, [(t.name, t.num_elements, t.num_pruned) for t in tensors])
        what = "is what its recipe makes of" if result.has_order else "fits its report and"
        terminal.text(
            f"{pruned} {what} {against}: {format_size(result.num_bytes)} "
            f"compared, {count(result.num_pruned)} of {count(result.num_elements)} elements pruned "
            f"({percent(result.num_pruned, result.num_elements)})."
        )
        if not result.has_order:
            terminal.text(
                "Whether these have the lowest scores is not known: it was pruned in rounds, and "
                "what the last one ranked is gone."
            )
    else:
        for problem in result.problems:
            terminal.text(problem)
    if not result.is_good:
        context.exit(process.DIFFERENT)


@command("diff", OutputOptions)
@click.argument("first", metavar="A", type=Path)
@click.argument("second", metavar="B", type=Path)
@click.option("--exit-code", is_flag=True, help="Exit with 3 if there is a difference.")
def diff(context: click.Context, first: Path, second: Path, exit_code: bool) -> None:
    """Compare two checkpoints tensor by tensor: values, and which elements are zero.

    Names, shapes, dtypes and the metadata of the headers are compared too. The tensors may be in
    different files; files without weights are not compared. Tensors that are equal bit for bit are
    listed only with -v.

    \b
    distprune diff Llama-3.2-1B-50 Llama-3.2-1B-50-tuned
    """
    output = made(context, OutputOptions)
    from distprune.files.checkpoints.checkpoint import open_checkpoint
    from distprune.files.inspecting import compare, compare_metadata

    a, b = (open_checkpoint(path) for path in (first, second))
    terminal = output.terminal()
    with Meter(terminal) as meter:
        tensors = list(compare(a, b, meter.reading(a.num_bytes + b.num_bytes)))
    metadata = compare_metadata(a, b)
    are_equal = all(tensor.is_equal for tensor in tensors) and not metadata
    if output.as_json:
        values = [{**asdict(tensor), "is_equal": tensor.is_equal} for tensor in tensors]
        texts = {key: {"first": one, "second": two} for key, (one, two) in metadata.items()}
        terminal.json({"are_equal": are_equal, "metadata": texts, "tensors": values})
    else:
        _show_differences(terminal, tensors, metadata, with_equal=output.verbose)
    if exit_code and not are_equal:
        context.exit(process.DIFFERENT)


def _show_differences(
    terminal: Terminal,
    tensors: list[TensorDifference],
    metadata: Mapping[str, tuple[Sequence[str], Sequence[str]]],
    *,
    with_equal: bool,
) -> None:
    rows: list[tuple[str, ...]] = []
    for tensor in tensors:
        differs = f"differs in {percent(tensor.num_differing, tensor.numel)}"
        zeros = tensor.num_zero_in_both, tensor.num_zero_in_first, tensor.num_zero_in_second
        counts = tuple(map(count, (tensor.num_differing, *zeros)))
        if tensor.problem:
            rows.append((tensor.name, tensor.problem, "", "", "", ""))
        elif not tensor.is_equal or with_equal:
            rows.append((tensor.name, "equal" if tensor.is_equal else differs, *counts))
    numbers = ("elements that differ", "zero in both", "zero in A only", "zero in B only")
    if rows:
        terminal.table(("tensor", "values", *numbers), rows, right=numbers)
        terminal.text()
    for key, values in metadata.items():
        one, two = (", ".join(map(ascii, texts)) or "none" for texts in values)
        terminal.text(f"Metadata differ: {ascii(key)[1:-1]}: {one} in A, {two} in B.")
    num_equal = sum(tensor.is_equal for tensor in tensors)
    terminal.text(f"{num_equal} of {len(tensors)} tensors are equal bit for bit.")
