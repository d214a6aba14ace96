"""The list of all commands, and those on distprune itself: ``recipe``, ``env``, ``selftest``."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer

import distprune
from distprune.cli import selftest
from distprune.cli.console import Terminal
from distprune.cli.options import AsJson, complete, find, read
from distprune.files.errors import SelectionError
from distprune.files.text import format_size
from distprune.recipes.request import recipe_schema, shipped_recipes

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

  0 done, 1 failure, 2 wrong usage or recipe, 3 checkpoints that differ (verify,
diff --exit-code), 130 and 143 interrupted (SIGINT, SIGTERM).
"""


def _flowing(text: str) -> str:
    """Help whose lines are broken by the terminal, not by the source."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


# By name of a command, its panel in the help, and the module and function that are it.
_COMMANDS = {
    "plan": ("Prune", "plan", "plan"),
    "prune": ("Prune", "prune", "prune"),
    "apply": ("Prune", "copies", "apply"),
    "eval": ("Language models", "language_models", "evaluate"),
    "calibrate": ("Language models", "language_models", "calibrate"),
    "inspect": ("Look", "inspect", "inspect"),
    "verify": ("Look", "copies", "verify"),
    "diff": ("Look", "copies", "diff"),
    "recipe": ("Recipes and support", "app", "recipe"),
    "env": ("Recipes and support", "app", "env"),
    "selftest": ("Recipes and support", "app", "_selftest"),
}


def make_app(names: Iterable[str] = _COMMANDS) -> typer.Typer:
    """The parser of some commands; the modules of others are not imported."""
    app = typer.Typer(
        help=_flowing(_HELP),
        epilog=_flowing(_EPILOG),
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_main)
    for name in names:
        panel, module, function = _COMMANDS[name]
        command = getattr(importlib.import_module(f"distprune.cli.{module}"), function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
            continue
        about, has_help, settings = command.__doc__ or "", True, {}
        if command is _selftest:  # it has its own parser, which works without typer
            about, has_help = selftest.ABOUT, False
            settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(
            name,
            help=_flowing(about),
            rich_help_panel=panel,
            add_help_option=has_help,
            context_settings=settings,
        )(command)
    return app


def _show_version(is_set: bool) -> None:
    if is_set:
        print(distprune.__version__)
        raise typer.Exit


def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> None:
    """Parse a command line and run its command; typer ends with SystemExit."""
    app = make_app([name for name in arguments[:1] if name in _COMMANDS] or _COMMANDS)
    app(args=list(arguments), prog_name="distprune")


recipe = typer.Typer(
    help="List, show and describe recipes: what to prune, and how much, as a file.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@recipe.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the recipes that `-r NAME` knows."""
    about = {}
    for name, path in shipped_recipes().items():  # each begins with a comment
        first = path.read_text(encoding="utf-8").partition("\n")[0]
        about[name] = first.removeprefix("#").strip()
    terminal = Terminal(as_json)
    if as_json:
        terminal.json([{"name": name, "about": text} for name, text in about.items()])
    else:
        terminal.table(("recipe", "what it does"), list(about.items()))


@recipe.command("show")
def show(
    name: Annotated[
        str,
        typer.Argument(help="A shipped recipe, or a file of your own.", autocompletion=complete),
    ],
    as_json: AsJson = False,
) -> None:
    """Check a recipe and print it; the start of one's own: `recipe show layer_50 > my.yaml`."""
    from distprune.recipe import Recipe  # it imports torch

    own = read(name, Recipe)
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(own.as_mapping())
    else:
        for line in find(name).read_text(encoding="utf-8").rstrip().splitlines():
            terminal.text(line)


@recipe.command("schema")
def schema(as_json: AsJson = False) -> None:
    """Print the JSON schema of a recipe, for editors that complete and check YAML.

    It is JSON with and without --json.
    """
    Terminal(True).json(recipe_schema())


_PACKAGES = (
    "torch", "numpy", "safetensors", "transformers", "accelerate", "typer", "rich",
    "PyYAML", "pydantic", "matplotlib",
)  # fmt: skip


def env(
    path: Annotated[Path, typer.Argument(help="A folder on the file system to report.")] = Path(
        "."
    ),
    as_json: AsJson = False,
) -> None:
    """Show versions, devices, memory and the file system, for bug reports."""
    if not path.exists():
        raise SelectionError(f"{path} does not exist; expected a folder.")
    import platform

    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()
    number = 0 if accelerator is None else torch.accelerator.device_count()
    kind = "none" if accelerator is None else accelerator.type
    names = ("gloo", "nccl", "mpi", "ucc", "xccl") if dist.is_available() else ()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "distprune": distprune.__version__,  # the one that runs, installed or not
        **{package: _version(package) for package in _PACKAGES},
        "accelerator": f"{number} x {kind}" if number else kind,
        "distributed backends": ", ".join(filter(dist.is_backend_available, names)) or "none",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory": format_size(memory),
        "free on the disk": format_size(shutil.disk_usage(path).free),
    }
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(facts)
        return
    terminal.table(("what", "value"), [(key, str(value)) for key, value in facts.items()])


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _selftest(context: typer.Context) -> None:
    raise typer.Exit(selftest.main(context.args))
