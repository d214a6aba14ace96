"""All commands, and what ``distprune --help`` says."""

from __future__ import annotations

from typing import Annotated

import typer

import distprune
from distprune.cli import applying, environment, looking, planning, pruning, recipes, verifying

_HELP = """
Prune Hugging Face safetensors checkpoints of any size, without building the model.

Memory is bounded by a constant, the count is exact, and the result is the same to the byte on any
number of processes. Every command has a --help of its own, with examples.
"""
_EPILOG = """
[bold]Examples[/bold]

  distprune plan Llama-3.2-1B --sparsity 0.5

  distprune prune Llama-3.2-1B Llama-3.2-1B-50 --sparsity 0.5

  distprune verify Llama-3.2-1B-50 --against Llama-3.2-1B

  distprune inspect Llama-3.2-1B-50

[bold]Exit codes[/bold]

  0 done, 1 a defect of distprune, 2 wrong usage or recipe, 3 bad checkpoint, 4 disk or destination,
  5 ranks that differ or are lost, 130 and 143 interrupted (SIGINT, SIGTERM).
"""

app = typer.Typer(
    help=_HELP,
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan", rich_help_panel="Prune")(planning.plan)
app.command("prune", rich_help_panel="Prune")(pruning.prune)
app.command("apply", rich_help_panel="Prune")(applying.apply)
app.command("inspect", rich_help_panel="Look")(looking.inspect)
app.command("verify", rich_help_panel="Look")(verifying.verify)
app.command("diff", rich_help_panel="Look")(looking.diff)
app.add_typer(recipes.app, name="recipe", rich_help_panel="Recipes and support")
app.command("env", rich_help_panel="Recipes and support")(environment.env)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(distprune.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass
