"""What commands write: data to stdout; notes, progress and errors to stderr."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from distprune.files.errors import format_percent, format_size, printable
from distprune.recipes import GroupRecipe

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.checkpoint import Checkpoint
    from distprune.files.planning import Plan
    from distprune.files.reports import TensorReport


class _Errors(Console):
    """Work goes on when nobody reads what it says; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Terminal:
    """What one command writes, on rank 0.

    Args:
        as_json: whether data is one JSON document.
        quiet: whether notes and progress are left out.
    """

    def __init__(self, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.is_leader = os.environ.get("RANK", "0") == "0"
        self.is_quiet = quiet or not self.is_leader
        self.errors = _Errors(stderr=True, highlight=False, markup=False, emoji=False)

    def json(self, value: Any) -> None:
        """The JSON document of the command."""
        if self.is_leader:
            print(json.dumps(value, indent=2))

    def text(self, text: str = "") -> None:
        """A line of data, with escape sequences in place of what is not visible."""
        if self.is_leader:
            print(printable(text))

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[str | int]], right: Sequence[str] = ()
    ) -> None:
        """Rows below headings, in one line each: programs read them, and names are long.

        Args:
            columns: the headings.
            rows: their values; escape sequences replace what is not visible.
            right: headings of columns that are aligned to the right.
        """
        lines = [columns, *([_cell(value) for value in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines if self.is_leader else ():
            cells = zip(columns, line, widths, strict=True)
            texts = (c.rjust(w) if heading in right else c.ljust(w) for heading, c, w in cells)
            print("  ".join(texts).rstrip())

    def note(self, text: str) -> None:
        """Something to know, unless ``--quiet``."""
        if not self.is_quiet:
            self.errors.print(printable(text), soft_wrap=True)


class Meter:
    """Shows the progress of all ranks: a bar on a terminal, else a line every ten seconds."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal, self._written_at = terminal, time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=terminal.errors,
            transient=True,
            disable=terminal.is_quiet or not terminal.errors.is_terminal,
        )
        self._task = self._bar.add_task("", text="")

    def __enter__(self) -> Meter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, state: tuple[str, int, int, str]) -> None:
        """Show how far a run has come, as ``files.team.Progress`` says it."""
        phase, done, total, unit = state
        text = f"{done:,} of {total:,} {unit}"
        if unit == "bytes":
            text = f"{format_size(done)} of {format_size(total)}"
        self._bar.update(
            self._task, description=phase, total=max(total, 1), completed=done, text=text
        )
        if self._bar.disable and time.monotonic() - self._written_at >= 10:
            self._written_at = time.monotonic()
            self._terminal.note(f"{phase}: {text}")


def _cell(value: str | int) -> str:
    return printable(value) if isinstance(value, str) else f"{value:,}"


def counted(value: int, what: str) -> str:
    """ "1 tensor", "2 tensors"."""
    return f"{value:,} {what}" if value == 1 else f"{value:,} {what}s"


def share_text(part: int, whole: int) -> str:
    """ "1,234 of 5,678 elements (21.73 %)"."""
    return f"{part:,} of {whole:,} elements ({format_percent(part, whole)})"


def time_text(run: Mapping[str, Any]) -> str:
    """ "3.2 s on 2 processes", from what a report says of its run."""
    ranks = "1 process" if run["num_ranks"] == 1 else f"{run['num_ranks']} processes"
    return f"{run['seconds']:.1f} s on {ranks}"


def note_files(terminal: Terminal, checkpoint: Checkpoint) -> None:
    """Write to stderr where the checkpoint was found and which files are not copied."""
    if checkpoint.note:
        terminal.note(checkpoint.note)
    for name, reason in checkpoint.skipped:
        terminal.note(f"Not copied: {name} ({reason}).")


def show_counts(terminal: Terminal, tensors: Iterable[TensorReport]) -> None:
    """Write a table of tensors: how many of their elements are pruned."""
    numbers = ("elements", "pruned", "sparsity")
    counts = [(t.name, t.num_elements, t.num_pruned) for t in tensors]
    rows = [(name, size, pruned, format_percent(pruned, size)) for name, size, pruned in counts]
    terminal.table(("tensor", *numbers), rows, right=numbers)


def discard_unfinished(terminal: Terminal, destination: Path) -> None:
    """Remove the unfinished results of a destination, and write which they were."""
    from distprune.files.disk import discard

    if not terminal.is_leader:
        return
    removed = list(map(str, discard(destination)))
    if terminal.as_json:
        terminal.json({"discarded": removed})
    else:
        nothing = f"There is no unfinished result of {destination}."
        terminal.text(f"Removed {', '.join(removed)}." if removed else nothing)


# Magnitudes alone ruined the language model that was measured; docs/criteria.md has the table.
_TOO_MUCH_BY_MAGNITUDE = 0.4


def show_warnings(terminal: Terminal, plan: Plan) -> None:
    """Write warnings about a selection that is probably a mistake to stderr."""
    for warning in plan.warnings:
        terminal.note(f"Warning: {warning}")
    is_causal = "ForCausalLM" in str(plan.checkpoint.config.get("architectures"))
    is_much = plan.num_to_prune >= _TOO_MUCH_BY_MAGNITUDE * plan.num_elements
    if is_causal and is_much and any(group.recipe.score == "magnitude" for group in plan.groups):
        terminal.note(
            f"Warning: pruning {plan.num_to_prune / plan.num_elements:.0%} of a language model by "
            "magnitude may ruin it. Without --score, text that it writes ranks its weights, and "
            "the kept ones move: that loses far less. distprune eval measures it."
        )


def summary(plan: Plan) -> str:
    """A plan in one sentence."""
    files = counted(len(plan.checkpoint.files), "weight file")
    others = counted(len(plan.copied), "other file")
    is_one = len(plan.groups) == 1
    how = ranking_text(plan.groups[0].recipe) if is_one else f"in {len(plan.groups)} groups"
    return (
        f"Prunes {share_text(plan.num_to_prune, plan.num_elements)} in {len(plan.tensors):,} "
        f"of {counted(len(plan.verdicts), 'tensor')}, {how}; "
        f"{format_size(plan.checkpoint.num_bytes)} in {files}, {others} copied."
    )


def ranking_text(recipe: GroupRecipe) -> str:
    """How the tensors of a recipe without groups are ranked."""
    if recipe.pattern is not None:
        return f"keeping {recipe.pattern}"
    how = {"global": "together", "layer": "each on its own", "row": "row by row"}[recipe.scope]
    if recipe.budget is not None:
        how = f"each on its own, divided by budget {recipe.budget},"
    limits = ""
    if recipe.has_limits:
        low, high = (f"{100 * share:g}" for share in (recipe.min_sparsity, recipe.max_sparsity))
        limits = f", each tensor within {low} to {high} %"
    return f"ranked {how} by {recipe.score_text}{limits}"


def shape_text(shape: Sequence[int]) -> str:
    """ "4096 x 1024"; "scalar" for no dimensions."""
    return " x ".join(map(str, shape)) or "scalar"
