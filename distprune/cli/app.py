"""All commands; here, ``recipe ls`` and ``recipe show``."""

from __future__ import annotations

import click

import distprune
from distprune.cli import copies, language_models
from distprune.cli.console import Terminal
from distprune.cli.inspect import inspect
from distprune.cli.prune import plan, prune
from distprune.files.errors import SelectionError, translated
from distprune.recipes import load_recipe, shipped_recipes


class _Commands(click.Group):
    """Lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(distprune.__version__, message="%(version)s")
def app() -> None:
    """Prune Hugging Face safetensors checkpoints of any size, without building the model.

    Memory is bounded by a constant, the count is exact, and the result is the same to the byte on
    any number of processes. SRC is a folder of safetensors files, one such file, or the name of a
    model that is in the local Hugging Face cache (org/name).

    Exit codes: 0 done, 1 failure, 2 wrong usage or recipe, 3 checkpoints that differ (verify, and
    diff --exit-code).
    """


@app.group()
def recipe() -> None:
    """List and show recipes: what to prune, and how much, as a file."""


@recipe.command()
def ls() -> None:
    """List the recipes that `-r NAME` knows."""
    rows = [
        (name, path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "))
        for name, path in shipped_recipes().items()  # each begins with a comment
    ]
    Terminal().table(("recipe", "what it does"), rows)


@recipe.command()
@click.argument("name")
def show(name: str) -> None:
    """Check a recipe and print it with every default: `recipe show layer_50 > my.yaml`."""
    with translated(SelectionError):
        chosen = load_recipe(name)
    for line in chosen.to_yaml().splitlines():
        Terminal().text(line)


# It has its own parser, which works without click.
_selftest = click.Command("selftest", help="Check what distprune guarantees on this machine.")
_ALL = (
    plan, prune, language_models.shrink, copies.apply, language_models.evaluate,
    language_models.calibrate, language_models.write_text, inspect, copies.verify,
    copies.diff, recipe, _selftest,
)  # fmt: skip
app.commands = {str(each.name): each for each in _ALL}
