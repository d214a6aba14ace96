"""``distprune recipe``: the recipes that come with it, and the form of one's own."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from distprune.cli.console import Terminal
from distprune.cli.options import AsJson
from distprune.files.errors import SelectionError
from distprune.recipe import Recipe, load_recipe

app = typer.Typer(
    help="List, show and describe recipes: what to prune, and how much, as a file.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


def shipped() -> dict[str, Path]:
    """The recipes in this package, by name."""
    folder = Path(str(resources.files("distprune.cli") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def complete(incomplete: str) -> list[str]:
    """Names of shipped recipes for the shell, which completes names of files by itself."""
    return [name for name in shipped() if name.startswith(incomplete)]


def find(name: str) -> Path:
    """A recipe's file: the name of a shipped one, or a path.

    Raises:
        SelectionError: there is neither.
    """
    known = shipped()
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        raise SelectionError(
            f"{name!r} is no file and no shipped recipe; expected a YAML file, or one of "
            f"{', '.join(known)}.",
        )
    return path


def read(name: str) -> Recipe:
    """A checked recipe, by path or name.

    Raises:
        SelectionError: no such recipe, PyYAML is missing, or with all that is wrong in it.
    """
    path = find(name)
    try:
        return load_recipe(path)
    except ImportError as error:
        raise SelectionError("recipes need PyYAML: pip install 'distprune[cli]'") from error
    except ValueError as error:
        raise SelectionError(str(error)) from error
    except OSError as error:
        raise SelectionError(f"{path} cannot be read: {error.strerror}.") from error


@app.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the recipes that `-r NAME` knows."""
    about = {name: _first_comment(path) for name, path in shipped().items()}
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
    recipe = read(name)
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
    from distprune.cli.schema import recipe_schema

    Terminal(True).json(recipe_schema())


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()
