"""All commands, and what ``distprune --help`` says; ``recipe`` and ``env``, which are small."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import typer

import distprune
from distprune.cli import (
    comparing,
    copying,
    inspect,
    language_models,
    plan,
    process,
    prune,
    selftest,
)
from distprune.cli.console import Terminal
from distprune.cli.options import AsJson, complete, find, read
from distprune.cli.process import printable
from distprune.files.text import format_size
from distprune.recipe import Recipe
from distprune.recipes.request import recipe_schema, shipped_recipes

recipes_app = typer.Typer(
    help="List, show and describe recipes: what to prune, and how much, as a file.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@recipes_app.command("ls")
def ls(as_json: AsJson = False) -> None:
    """List the recipes that `-r NAME` knows."""
    about = {name: _first_comment(path) for name, path in shipped_recipes().items()}
    terminal = Terminal(as_json)
    if as_json:
        terminal.json([{"name": name, "about": text} for name, text in about.items()])
    else:
        terminal.table(("recipe", "what it does"), list(about.items()))


@recipes_app.command("show")
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


@recipes_app.command("schema")
def schema(as_json: AsJson = False) -> None:
    """Print the JSON schema of a recipe, for editors that complete and check YAML.

    It is JSON with and without --json.
    """
    Terminal(True).json(recipe_schema())


def _first_comment(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip()


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
        raise typer.BadParameter(f"{path} does not exist; expected a folder.")
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
        "file system": f"{_file_system(path)} ({format_size(shutil.disk_usage(path).free)} free)",
    }
    terminal = Terminal(as_json)
    if as_json:
        terminal.json(facts)
        return
    terminal.table(("what", "value"), [(key, str(value)) for key, value in facts.items()])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _file_system(path: Path) -> str:
    """The type of the file system that a path is on ("ext4"), as far as the system tells."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    # Of mounts on one place, the last one counts; spaces in their names are escaped.
    kinds = {line.split()[1].encode().decode("unicode_escape"): line.split()[2] for line in lines}
    inside = [mount for mount in kinds if path.resolve().is_relative_to(mount)]
    return kinds[max(inside, key=len)] if inside else "unknown"


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

  0 done, 1 a defect of distprune, 2 wrong usage or recipe, 3 bad checkpoint or text,
4 disk or destination, 5 ranks that differ or are lost, 6 checkpoints that differ
(diff --exit-code), 7 too little memory or too few open files, 130 and 143 interrupted
(SIGINT, SIGTERM), 141 the reader of stdout is gone.
"""


def _flowing(text: str) -> str:
    """Help whose lines are broken by the terminal, not by the source."""
    paragraphs = cleandoc(text).split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


app = typer.Typer(
    help=_flowing(_HELP),
    epilog=_flowing(_EPILOG),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Prune": (plan.plan, prune.prune, copying.apply, copying.convert),
    "Language models": (language_models.evaluate, language_models.calibrate),
    "Look": (inspect.inspect, comparing.verify, comparing.diff),
    "Recipes and support": (env,),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        _name = "eval" if _command is language_models.evaluate else None
        app.command(_name, help=_flowing(_command.__doc__ or ""), rich_help_panel=_panel)(_command)


# It has its own parser, which works without typer.
@app.command(
    "selftest",
    help=_flowing(selftest.ABOUT),
    rich_help_panel="Recipes and support",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _selftest(context: typer.Context) -> None:
    raise typer.Exit(selftest.main(context.args))


app.add_typer(recipes_app, name="recipe", rich_help_panel="Recipes and support")


def _show_version(is_set: bool) -> None:
    if is_set:
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


# The base of the parser's errors: recent versions of typer contain a parser, older ones use click.
_ParserError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def run(arguments: Sequence[str]) -> int:
    """Parse a command line and run its command."""
    given = list(arguments)
    # Help that fills the buffer of stdout is written where nothing of ours says what failed.
    is_help = "--help" in given
    try:
        with process.writing() if is_help else contextlib.nullcontext():
            # typer.Exit in a command is what comes back.
            code = app(args=given, prog_name="distprune", obj=given.copy(), standalone_mode=False)
    except typer.Abort:
        return process.INTERRUPTED
    except _ParserError as error:
        if not process.is_leader():  # all ranks have the same command line
            return process.USAGE
        _show_usage(error)
        if process.wants_json(arguments):
            # Without a command, the message is empty.
            text = printable(error.format_message()) or "no command is given."
            process.write_document(json.dumps({"exit_code": process.USAGE, "error": text}) + "\n")
        return process.USAGE
    return code if isinstance(code, int) else process.OK


def _show_usage(error: Any) -> None:
    """Write wrong usage to stderr, as typer does."""
    error.message = printable(error.message)
    try:
        from typer.rich_utils import rich_format_error
    except ImportError:
        error.show()
    else:
        rich_format_error(error)
