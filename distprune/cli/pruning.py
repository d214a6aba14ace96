"""``distprune prune``: on this process, on the ranks of torchrun, or on some that it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distprune.cli import choosing, exits, planning, ranks
from distprune.cli.console import Terminal, count, counted, percent, size
from distprune.cli.options import AsJson, Plot, Quiet, Timeout, Verbose
from distprune.cli.progress import Meter
from distprune.files.errors import Interrupted

if TYPE_CHECKING:  # torch comes with it
    from distprune.files.planning import Plan
    from distprune.files.report import Report

Destination = Annotated[
    Path,
    typer.Argument(
        metavar="DST", help="A new folder; it appears when all is done.", show_default=False
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        help="Start so many processes on this machine; they share the work.",
        show_default=False,
    ),
]
Masks = Annotated[
    bool | None,
    typer.Option(
        "--masks/--no-masks",
        help="Whether to write the masks (yes).",
        show_default=False,
    ),
]


def prune(
    context: typer.Context,
    source: planning.Source,
    destination: Destination,
    recipe: choosing.RecipeName = None,
    sparsity: choosing.Sparsity = None,
    pattern: choosing.Pattern = None,
    scope: choosing.Scope = None,
    score: choosing.Score = None,
    seed: choosing.Seed = None,
    include: choosing.Include = None,
    exclude: choosing.Exclude = None,
    min_ndim: choosing.MinNdim = None,
    nan: choosing.Nan = None,
    masks: Masks = None,
    nproc: Nproc = None,
    timeout: Timeout = 600.0,
    plot: Plot = None,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Write a pruned copy of a checkpoint; the same to the byte on any number of processes.

    Files, headers and index stay as they are, and so does every byte but those of the pruned
    elements, which become zero. DST/distprune holds the masks, the recipe and the report. After an
    interruption, whatever it was, the same command goes on where the last one stopped.

    [bold]Examples[/bold]

      distprune prune Llama-3.2-1B Llama-3.2-1B-50 --sparsity 0.5

      distprune prune Llama-3.2-1B Llama-3.2-1B-2of4 -r semi_structured_2_4 --nproc 4

      torchrun --nproc-per-node 8 -m distprune prune SRC DST --sparsity 0.5 --scope row
    """
    options = {
        "sparsity": sparsity, "pattern": pattern, "scope": scope, "score": score, "seed": seed,
        "include": include, "exclude": exclude, "min_ndim": min_ndim, "nan": nan, "masks": masks,
    }  # fmt: skip
    verbosity = -1 if quiet else verbose
    if nproc is not None:
        if ranks.is_rank():
            raise typer.BadParameter("torchrun has started the processes already; leave it out.")
        _check(source, recipe, options, plot)
        raise typer.Exit(ranks.start_ranks(ranks.without_option(context.obj, "--nproc"), nproc))
    terminal = Terminal(as_json, verbosity, is_leader=ranks.is_leader())

    def make_recipe() -> choosing.CommandRecipe:
        _check_plot(plot)
        return choosing.resolve(recipe, options)

    stop = ranks.Stop()
    # Before the ranks meet: a signal that reaches all of them must not end some at once.
    with stop.listening(), ranks.process_group(timeout):
        plan, report = _prune(terminal, source, destination, make_recipe, stop)
    if terminal.is_leader:
        _show(terminal, report, destination)
        if plot is not None:
            _draw(terminal, plan, report, plot)


def _prune(
    terminal: Terminal,
    source: Path,
    destination: Path,
    make_recipe: Callable[[], choosing.CommandRecipe],
    stop: ranks.Stop,
) -> tuple[Plan, Report]:
    from distprune._common.collectives import world
    from distprune.files.pruning import plan_together
    from distprune.files.pruning import prune as carry_out
    from distprune.files.team import Team

    recipe = Team(world()).attempt(make_recipe)
    plan = plan_together(source, recipe)
    terminal.note(planning.summary(plan))
    try:
        with Meter(terminal) as meter:
            return plan, carry_out(plan, destination, progress=meter, stop=stop)
    except Interrupted as error:
        error.exit_code = stop.code or exits.TERMINATED
        raise


def _check(source: Path, recipe: str | None, options: dict[str, Any], plot: Path | None) -> None:
    """Find what is wrong before processes are started: then it is said once, and at once."""
    from distprune.files.planning import plan

    _check_plot(plot)
    plan(source, choosing.resolve(recipe, options))


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from distprune.cli import plotting

        plotting.check(plot)


def _show(terminal: Terminal, report: Report, destination: Path) -> None:
    if terminal.as_json:
        terminal.json({**json.loads(report.result_json()), "run": json.loads(report.run_json())})
        return
    if terminal.verbosity > 0:
        rows = [
            (each.name, *map(count, pair), percent(*reversed(pair)))
            for each in report.tensors
            for pair in [(each.num_elements, each.num_pruned)]
        ]
        numbers = ("elements", "pruned", "sparsity")
        terminal.table(("tensor", *numbers), rows, right=numbers)
    terminal.text(
        f"Pruned {count(report.num_pruned)} of {count(report.num_elements)} elements "
        f"({percent(report.num_pruned, report.num_elements)}) in "
        f"{counted(len(report.tensors), 'tensor')}."
    )
    if report.threshold is not None:
        terminal.text(
            f"The largest magnitude that went is {report.threshold:.6g}: of "
            f"{count(report.num_ties)} elements that have it, {count(report.num_ties_pruned)} went."
        )
    run = report.run
    seconds = sum(run.seconds.values())
    processes = "process" if run.num_ranks == 1 else "processes"
    terminal.text(
        f"{destination}: {seconds:.1f} s on {run.num_ranks} {processes}, "
        f"peak memory {size(max(run.peak_rss_bytes))}."
    )


def _draw(terminal: Terminal, plan: Plan, report: Report, path: Path) -> None:
    from distprune.cli import plotting
    from distprune.files.inspecting import inspect

    pruned = {tensor.entry.name for tensor in plan.tensors}
    sparsities = {tensor.name: tensor.sparsity for tensor in report.tensors}
    facts = list(inspect(plan.checkpoint, (), only=pruned))
    plotting.draw(path, sparsities, facts, report.threshold)
    terminal.note(f"{os.fspath(path)}: sparsity by tensor, and magnitudes before pruning.")
