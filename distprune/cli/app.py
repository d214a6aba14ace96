"""All commands, and what ``distprune --help`` says."""

from __future__ import annotations

from typing import Annotated

import typer

import distprune
from distprune.cli import environment, recipes

_HELP = """
Prune Hugging Face safetensors checkpoints of any size, without building the model.

Memory is bounded by a constant, the count is exact, and on any number of processes the result is
the same to the byte.
"""

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
