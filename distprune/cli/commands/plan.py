"""``distprune plan``: what would be pruned, from headers alone."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from distprune.cli import costing, exits, plan_table, recipe_options, sources
from distprune.cli.console import Terminal, duration
from distprune.cli.options import AsJson, Quiet, Source, Verbose
from distprune.files.text import format_size

MaybeDestination = Annotated[
    Path | None,
    typer.Argument(
        metavar="DST",
        help="Where prune will write, to check that there is enough space. Nothing is written now.",
        show_default=False,
    ),
]


def plan(
    source: Source,
    destination: MaybeDestination = None,
    recipe: recipe_options.RecipeName = None,
    sparsity: recipe_options.Sparsity = None,
    pattern: recipe_options.Pattern = None,
    scope: recipe_options.Scope = None,
    score: recipe_options.Score = None,
    statistics: recipe_options.Statistics = None,
    scores: recipe_options.Scores = None,
    normalize: recipe_options.Normalize = None,
    seed: recipe_options.Seed = None,
    include: recipe_options.Include = None,
    also: recipe_options.Also = None,
    exclude: recipe_options.Exclude = None,
    min_ndim: recipe_options.MinNdim = None,
    min_sparsity: recipe_options.MinSparsity = None,
    max_sparsity: recipe_options.MaxSparsity = None,
    input_dim: recipe_options.InputDim = None,
    nan: recipe_options.Nan = None,
    follow_links: sources.FollowLinks = False,
    as_json: AsJson = False,
    verbose: Verbose = 0,
    quiet: Quiet = False,
) -> None:
    """Show what would be pruned, what would not and why, and the disk space and time needed.

    Reads headers, and a few megabytes to measure the disk; writes nothing. Without a sparsity, a
    pattern or a recipe, it shows the default selection. Names that differ only in numbers share a
    line; -v lists every tensor. The exit code is 4 if there is not enough space at DST.

    [bold]Examples[/bold]

      distprune plan Llama-3.2-1B

      distprune plan Llama-3.2-1B Llama-3.2-1B-50 --sparsity 0.5

      distprune plan Llama-3.2-1B -r semi_structured_2_4 --exclude "*.up_proj.*"
    """
    from distprune.files.planning import plan as make_plan

    # Without an amount there is still a selection.
    has_amount = not (recipe is None and sparsity is None and pattern is None)
    chosen = recipe_options.resolve(
        recipe,
        {
            "sparsity": sparsity if has_amount else 0.0, "pattern": pattern, "scope": scope,
            "score": score, "normalize": normalize, "seed": seed, "include": include,
            "also": also, "exclude": exclude, "min_ndim": min_ndim, "input_dims": input_dim,
            "nan": nan, "min_sparsity": min_sparsity, "max_sparsity": max_sparsity,
            "statistics": statistics, "scores": scores,
        },
    )  # fmt: skip
    made = make_plan(source, chosen, follow_links=follow_links)
    cost = costing.estimate(made, destination)
    terminal = Terminal(as_json, -1 if quiet else verbose)
    sources.tell(terminal, made.checkpoint)
    plan_table.show_warnings(terminal, made)
    if as_json:
        terminal.json(
            plan_table.as_values(made, has_amount) | {"cost": asdict(cost) | {"fits": cost.fits}}
        )
    else:
        plan_table.show(terminal, made, one_by_one=verbose > 0, has_amount=has_amount)
        _show_cost(terminal, cost, destination)
    if cost.fits is False:
        raise typer.Exit(exits.OUTPUT)


def _show_cost(terminal: Terminal, cost: costing.Cost, destination: Path | None) -> None:
    least, most = map(duration, cost.seconds)
    speed = ""
    if cost.sampled_bytes_per_second is not None:
        speed = f" A sample was read at {format_size(cost.sampled_bytes_per_second)}/s."
    terminal.text(
        f"Pruning reads {format_size(cost.read_bytes)} and writes {format_size(cost.write_bytes)}; "
        f"that takes one process from {least} to {most}.{speed}"
    )
    if destination is None:
        return
    if os.path.lexists(destination):
        terminal.text(f"{destination} exists already.")
    lack = "" if cost.fits else "There is not enough space: "
    terminal.text(
        f"{lack}{format_size(cost.missing_bytes)} are needed and "
        f"{format_size(cost.free_bytes or 0)} are free at {destination}."
    )
