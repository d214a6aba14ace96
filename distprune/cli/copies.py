"""``distprune apply``, ``verify`` and ``diff``: a checkpoint beside another one."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from distprune.cli import console
from distprune.cli.options import ListingOptions, RanksOptions, WritingOptions, command
from distprune.files.errors import format_percent, format_size

_DIFFERENT = 3  # the exit code


@command("apply", WritingOptions, "MASKS", "SRC", "DST")
def apply(given: WritingOptions, masks: Path, src: Path, dst: Path) -> None:
    """Write a copy of a checkpoint SRC with zeros where the masks of another one are zero.

    MASKS is a pruned checkpoint, or what distprune.save_masks wrote.

    The masked tensors must have the names and shapes of those in SRC; values and dtypes may differ.
    Everything else is copied as it is. DST/distprune holds the masks and the report. After an
    interruption the same command continues.

    \b
    distprune apply Llama-3.2-1B-50 Llama-3.2-1B-Instruct Instruct-50
    """
    from distprune.files.checkpoint import open_checkpoint
    from distprune.files.pruning import apply as write
    from distprune.files.team import process_group

    terminal = given.terminal()
    if given.discard:
        return console.discard_unfinished(terminal, dst)
    with process_group(given.timeout) as team, console.Meter(terminal) as meter:
        checkpoint = team.run(lambda: open_checkpoint(src))
        console.note_files(terminal, checkpoint)
        report = write(
            masks, checkpoint, dst, progress=meter.show, replace=given.force, tell=terminal.note
        )
    if given.as_json:
        terminal.json(report.model_dump() | {"not_copied": dict(report.skipped)})
        return
    if given.verbose:
        console.show_counts(terminal, report.tensors)
    share = console.share_text(report.num_pruned, report.num_elements)
    terminal.text(
        f"{dst}: the masks prune {share} in {console.counted(len(report.tensors), 'tensor')}; "
        f"{sum(t.num_zero for t in report.tensors):,} elements were zero before."
    )


class VerifyOptions(ListingOptions, RanksOptions):
    """The options of verify."""

    against: Path = Field(description="Its source.")
    scores: Path | None = Field(None, description="Scores that ranked it, if they were given.")


@command("verify", VerifyOptions, "DST")
def verify(given: VerifyOptions, dst: Path) -> None:
    """Check a pruned checkpoint against its source, byte by byte.

    The source is ranked again by the recipe: the masks must be the same, and every byte that was
    not pruned must equal that of the source. If anything is wrong, it is listed, and the exit code
    is 3. The order of a pruning in rounds is not known, and not compared.

    \b
    distprune verify Llama-3.2-1B-50 --against Llama-3.2-1B
    """
    from distprune.files.reports import read_report
    from distprune.files.team import process_group
    from distprune.files.verifying import verify as check

    terminal = given.terminal()
    with process_group(given.timeout), console.Meter(terminal) as meter:
        result = check(dst, given.against, scores=given.scores, progress=meter.show)
    if given.as_json:
        terminal.json({"is_good": result.is_good, **asdict(result)})
    elif result.is_good:
        if given.verbose:
            console.show_counts(terminal, read_report(dst).tensors)
        what = "is what its recipe makes of" if result.has_order else "fits its report and"
        terminal.text(
            f"{dst} {what} {given.against}: {format_size(result.num_bytes)} compared, "
            f"{result.num_pruned:,} of {result.num_elements:,} elements pruned "
            f"({format_percent(result.num_pruned, result.num_elements)})."
        )
        if not result.has_order:
            terminal.text(
                "Whether these have the lowest scores is not known: it was pruned in rounds, and "
                "what the last one ranked is gone."
            )
    for problem in () if given.as_json else result.problems:
        terminal.text(problem)
    if not result.is_good:
        sys.exit(_DIFFERENT)


class DiffOptions(ListingOptions):
    """The options of diff."""

    exit_code: bool = Field(False, description="Exit with 3 if there is a difference.")


@command("diff", DiffOptions, "A", "B")
def diff(given: DiffOptions, a: Path, b: Path) -> None:
    """Compare two checkpoints tensor by tensor: values, and which elements are zero.

    Names, shapes and dtypes are compared too. The tensors may be in different files; files without
    weights are not compared. Tensors that are equal bit for bit are listed only with -v.

    \b
    distprune diff Llama-3.2-1B-50 Llama-3.2-1B-50-tuned
    """
    from distprune.files.checkpoint import open_checkpoint
    from distprune.files.verifying import compare

    first, second = open_checkpoint(a), open_checkpoint(b)
    terminal = given.terminal()
    with console.Meter(terminal) as meter:
        tensors = list(compare(first, second, progress=meter.show))
    num_equal = sum(tensor.is_equal for tensor in tensors)
    are_equal = num_equal == len(tensors)
    if given.as_json:
        values = [{**asdict(tensor), "is_equal": tensor.is_equal} for tensor in tensors]
        terminal.json({"are_equal": are_equal, "tensors": values})
    else:
        numbers = ("elements that differ", "zero in both", "zero in A only", "zero in B only")
        rows: list[tuple[str | int, ...]] = []
        for tensor in tensors:
            differs = f"differs in {format_percent(tensor.num_differing, tensor.numel)}"
            zeros = (tensor.num_zero_in_both, tensor.num_zero_in_first, tensor.num_zero_in_second)
            if tensor.problem:
                rows.append((tensor.name, tensor.problem, "", "", "", ""))
            elif not tensor.is_equal or given.verbose:
                what = "equal" if tensor.is_equal else differs
                rows.append((tensor.name, what, tensor.num_differing, *zeros))
        if rows:
            terminal.table(("tensor", "values", *numbers), rows, right=numbers)
            terminal.text()
        terminal.text(f"{num_equal} of {len(tensors)} tensors are equal bit for bit.")
    if given.exit_code and not are_equal:
        sys.exit(_DIFFERENT)
