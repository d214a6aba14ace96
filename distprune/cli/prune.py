"""``distprune prune``: in this process, or on the ranks of torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distprune.cli import describing, process
from distprune.cli.console import (
    Meter,
    Terminal,
    count,
    counted,
    percent,
    share_text,
    time_text,
)
from distprune.cli.options import (
    Destination,
    OutputOptions,
    RecipeName,
    RecipeOptions,
    Source,
    WritingOptions,
    takes_options,
)
from distprune.cli.pruning_by_text import TextOptions, prune_by_text, with_score
from distprune.files.text import format_size

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.planning import Plan
    from distprune.files.recipe import FileRecipe
    from distprune.files.reports import GroupReport, Report


@takes_options
def prune(
    source: Source,
    destination: Destination,
    recipe: RecipeName = None,
    *,
    by_text: TextOptions,
    options: RecipeOptions,
    masks: Annotated[
        bool | None, typer.Option("--masks/--no-masks", help="Whether to write the masks (yes).")
    ] = None,
    card: Annotated[
        bool | None,
        typer.Option(
            "--card/--no-card",
            help="Whether README.md describes the pruning (yes) or is a copy of SRC's.",
        ),
    ] = None,
    writing: WritingOptions,
    output: OutputOptions,
) -> None:
    """Write a pruned copy of a checkpoint; the same to the byte on any number of processes.

    Files, headers and the index stay as they are; only the bytes of pruned elements change, to
    zero. DST/distprune holds the masks, the recipe and the report, and README.md describes the
    pruning above the text of the source's README.md. With --text, a language model is pruned by
    gradients on the text, and its kept weights move. After an interruption of any kind, the same
    command continues where the last one stopped; with --discard it removes the unfinished result
    instead. If this command has finished DST before, it changes nothing; --force replaces what
    another one has finished there.

    [bold]Examples[/bold]

      distprune prune Llama-3.2-1B Llama-3.2-1B-50 --sparsity 0.5

      distprune prune SRC DST -s 0.6 --text train.txt --eval held-out.txt

      distprune prune Llama-3.2-1B Llama-2of4 -r semi_structured_2_4

      distprune prune SRC DST -r wanda_row_50 --statistics stats.safetensors

      torchrun --nproc-per-node 8 -m distprune prune SRC DST -s 0.5 --scope row
    """
    terminal = output.terminal(is_leader=process.is_leader())
    if writing.discard:
        describing.discard_unfinished(terminal, destination)
        return
    by_text.check()

    def make_recipe() -> FileRecipe:
        return with_score(recipe, vars(options) | {"masks": masks, "card": card}, by_text)

    if by_text.text:
        report, plan_of_text = prune_by_text(
            terminal, source, destination, make_recipe, by_text, writing
        )
        _conclude(terminal, report, plan_of_text, destination)
        return

    def make_plan() -> Plan:
        from distprune.files import planning

        return planning.plan(source, make_recipe())

    with process.on_ranks(writing.timeout, make_plan) as plan:
        from distprune.files import pruning

        describing.tell(terminal, plan.checkpoint)
        describing.show_warnings(terminal, plan)
        terminal.note(describing.summary(plan))
        with Meter(terminal) as meter:
            report = pruning.prune(
                plan,
                destination,
                progress=meter,
                replace=writing.force,
                tell=terminal.note,
            )
    _conclude(terminal, report, plan, destination)


def _conclude(terminal: Terminal, report: Report, plan: Plan, destination: Path) -> None:
    """Say what was done, on the first rank."""
    if not terminal.is_leader:
        return
    from distprune.files.reports.building import advice_about

    for warning in report.warnings:
        terminal.note(f"Warning: {warning}")
    if advice := advice_about(plan, report.tensors):
        terminal.note(f"Warning: {advice}")
    _show(terminal, report, plan, destination)


def _show(terminal: Terminal, report: Report, plan: Plan, destination: Path) -> None:
    from distprune.base.memory import peak_rss_bytes

    if terminal.as_json:
        terminal.json(json.loads(report.to_json()) | describing.values_of_files(plan.checkpoint))
        return
    if terminal.verbosity > 0:
        _show_tensors(terminal, report)
    terminal.text(
        f"Pruned {share_text(report.num_pruned, report.num_elements)} in "
        f"{counted(len(report.tensors), 'tensor')}."
    )
    for group in report.groups:
        if text := _describe_group(report, group, plan.groups[group.index].recipe):
            terminal.text(text)
    num_limited = sum(tensor.held_at is not None for tensor in report.tensors)
    if num_limited:
        terminal.text(f"{counted(num_limited, 'tensor')} at a limit (held_at in the report).")
    run = report.run
    peak = max(*run.peak_rss_bytes, peak_rss_bytes())  # after the last file, too
    terminal.text(
        f"{destination}: {time_text(sum(run.seconds.values()), run.num_ranks)}, "
        f"peak memory {format_size(peak)}."
    )


def _show_tensors(terminal: Terminal, report: Report) -> None:
    """A table of the tensors; where their scores were normalised, with divisors and magnitudes."""
    is_normalized = any(tensor.divisor is not None for tensor in report.tensors)
    rows = []
    for tensor in report.tensors:
        numbers: list[float | None] = []
        if is_normalized:
            magnitude = report.magnitude_cut_at(tensor) if tensor.divisor is not None else None
            numbers = [tensor.divisor, magnitude]
        texts = ["" if number is None else f"{number:.4g}" for number in numbers]
        rows.append((tensor.name, tensor.num_elements, tensor.num_pruned, *texts))
    describing.show_counts(terminal, rows, ("divisor", "cut at") if is_normalized else ())


def _describe_group(report: Report, group: GroupReport, recipe: FileRecipe) -> str:
    """The sparsity of a group, if there are several; the threshold and its ties, if it has one."""
    texts = []
    if len(report.groups) > 1:
        texts.append(
            f"Group {group.index}: {count(group.num_pruned)} of {count(group.num_elements)} "
            f"({percent(group.num_pruned, group.num_elements)})."
        )
    if group.threshold is not None:
        limits = {tensor.held_at for tensor in report.tensors if tensor.group == group.index}
        is_limited = bool(limits - {None})
        is_magnitude = recipe.ranks_magnitudes and recipe.normalize is None
        what = "magnitude" if is_magnitude else "score"
        threshold = "Threshold of the ranking" if is_limited else f"Largest pruned {what}"
        ties = f"{count(group.num_ties or 0)} elements of this {what}"
        ties += " and within limits" if is_limited else ""
        texts.append(
            f"{threshold}: {group.threshold:.6g}{recipe.by_divisor('times the')}; "
            f"{count(group.num_ties_pruned or 0)} of {ties} were pruned."
        )
    return " ".join(texts)
