"""``distprune prune``: in this process, or on the ranks of torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from distprune.cli import describing, process
from distprune.cli.console import Meter, Terminal, counted, percent, share_text, time_text
from distprune.cli.options import (
    ESSENTIAL,
    OutputOptions,
    WritingOptions,
    command,
    destination,
    made,
    recipe_option,
    source,
)
from distprune.cli.pruning_by_text import TextOptions, chosen_recipe, prune_by_text
from distprune.files.text import format_size
from distprune.recipes import GroupRecipe, Recipe

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.planning import Plan
    from distprune.files.reports import GroupReport, Report


@command("prune", Recipe, TextOptions, WritingOptions, OutputOptions, first=ESSENTIAL)
@source
@destination
@recipe_option
def prune(context: click.Context, source: Path, destination: Path, recipe: str | None) -> None:
    """Write a pruned copy of a checkpoint; the same to the byte on any number of processes.

    Only the bytes of pruned elements change, to zero; DST/distprune holds masks, recipe and report.
    With --text, gradients on the text rank the weights of a language model, and its kept weights
    move. After an interruption the same command continues.

    \b
    distprune prune Llama-3.2-1B Llama-3.2-1B-50 -s 0.5
    distprune prune SRC DST -s 0.6 --text train.txt --eval held-out.txt
    torchrun --nproc-per-node 8 -m distprune prune SRC DST -r semi_structured_2_4
    """
    output, writing = made(context, OutputOptions), made(context, WritingOptions)
    by_text = made(context, TextOptions)
    terminal = output.terminal()
    if writing.discard:
        describing.discard_unfinished(terminal, destination)
        return
    by_text.check()
    if by_text.texts:
        chosen = chosen_recipe(context, recipe, by_text)
        report, plan = prune_by_text(terminal, source, destination, chosen, by_text, writing)
        _show(terminal, report, plan, destination, with_tensors=output.verbose)
        return

    def make_plan() -> Plan:
        from distprune.files import planning

        return planning.plan(source, chosen_recipe(context, recipe, by_text))

    with process.on_ranks(writing.timeout, make_plan) as plan:
        from distprune.files import pruning

        describing.note_files(terminal, plan.checkpoint)
        describing.show_warnings(terminal, plan)
        terminal.note(describing.summary(plan))
        with Meter(terminal) as meter:
            report = pruning.prune(
                plan,
                destination,
                progress=meter.files,
                replace=writing.force,
                tell=terminal.note,
            )
    _show(terminal, report, plan, destination, with_tensors=output.verbose)


def _show(
    terminal: Terminal, report: Report, plan: Plan, destination: Path, *, with_tensors: bool
) -> None:
    """Say what was done, on the first rank."""
    if not terminal.is_leader:
        return
    from distprune.base.memory import peak_rss_bytes
    from distprune.files.reports.building import advice_about

    for warning in (*report.warnings, advice_about(plan, report.tensors)):
        if warning:
            terminal.note(f"Warning: {warning}")
    if terminal.as_json:
        terminal.json(json.loads(report.to_json()) | describing.values_of_files(plan.checkpoint))
        return
    if with_tensors:
        _show_tensors(terminal, report)
    num_tensors = counted(len(report.tensors), "tensor")
    terminal.text(f"Pruned {share_text(report.num_pruned, report.num_elements)} in {num_tensors}.")
    for group in report.groups:
        if text := _group_text(report, group, plan.groups[group.index].recipe):
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


def _group_text(report: Report, group: GroupReport, recipe: GroupRecipe) -> str:
    """The sparsity of a group, if there are several; the threshold and its ties, if it has one."""
    texts = []
    if len(report.groups) > 1:
        texts.append(
            f"Group {group.index}: {group.num_pruned:,} of {group.num_elements:,} "
            f"({percent(group.num_pruned, group.num_elements)})."
        )
    if group.threshold is not None:
        is_magnitude = recipe.ranks_magnitudes and recipe.divisor is None
        what = "magnitude" if is_magnitude else "score"
        texts.append(
            f"Largest pruned {what}: {group.threshold:.6g}{recipe.by_divisor('times the')}; "
            f"{group.num_ties_pruned or 0:,} of {group.num_ties or 0:,} elements of this {what} "
            "were pruned."
        )
    return " ".join(texts)
