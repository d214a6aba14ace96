"""The list of all commands, and what ``distprune --help`` says."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterable, Sequence
from inspect import cleandoc
from typing import Annotated, Any

import typer

import distprune
from distprune.cli import process, selftest
from distprune.cli.process import printable

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


# By name of a command, its panel in the help, and the module and function that are it.
_COMMANDS = {
    "plan": ("Prune", "plan", "plan"),
    "prune": ("Prune", "prune", "prune"),
    "apply": ("Prune", "copies", "apply"),
    "convert": ("Prune", "copies", "convert"),
    "eval": ("Language models", "language_models", "evaluate"),
    "calibrate": ("Language models", "calibrating", "calibrate"),
    "inspect": ("Look", "inspect", "inspect"),
    "verify": ("Look", "copies", "verify"),
    "diff": ("Look", "copies", "diff"),
    "recipe": ("Recipes and support", "support", "recipe"),
    "env": ("Recipes and support", "support", "env"),
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


def _selftest(context: typer.Context) -> None:
    raise typer.Exit(selftest.main(context.args))


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


# The base of the parser's errors: recent versions of typer contain a parser, older ones use click.
_ParserError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def run(arguments: Sequence[str]) -> int:
    """Parse a command line and run its command."""
    given = list(arguments)
    app = make_app([name for name in given[:1] if name in _COMMANDS] or _COMMANDS)
    # Help that fills the buffer of stdout is written where nothing of ours says what failed.
    is_help = "--help" in given
    try:
        with process.writing() if is_help else contextlib.nullcontext():
            # typer.Exit in a command is what comes back.
            code = app(args=given, prog_name="distprune", obj=given.copy(), standalone_mode=False)
    except typer.Abort:
        return process.INTERRUPTED
    except _ParserError as error:
        if given[:1] == ["completion"]:
            error.message += " `distprune --install-completion` installs it for your shell."
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
