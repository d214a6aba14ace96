"""``distprune recipe``: the recipes that come with it, and the form of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distprune.cli.console import Terminal
from distprune.cli.options import AsJson
from distprune.cli.recipe_options import complete, find, read
from distprune.recipe import Recipe
from distprune.recipes.request import recipe_schema, shipped_recipes

app = typer.Typer(
    help="List, show and describe recipes: what to prune, and how much, as a file.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@app.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the recipes that `-r NAME` knows."""
    about = {name: _first_comment(path) for name, path in shipped_recipes().items()}
    terminal = Terminal(as_json)
    if as_json:
        terminal.json([{"name": name, "about": text} for name, text in about.items()])
    else:
        terminal.table(("recipe", "what it does"), list(about.items()))


@app.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(help="A shipped recipe, or a file of your own.", autocompletion=complete),
    ],
    as_json: AsJson = False,
) -> None:
    """Check a recipe and print it; the start of one's own: `recipe show layer_50 > my.yaml`."""
    recipe = read(name, Recipe)
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(recipe.as_mapping())
    else:
        for line in find(name).read_text(encoding="utf-8").rstrip().splitlines():
            terminal.text(line)


@app.command("schema")
def schema(as_json: AsJson = False) -> None:
    """Print the JSON schema of a recipe, for editors that complete and check YAML.

    It is JSON with and without --json.
    """
    Terminal(True).json(recipe_schema())


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
