"""All commands, and what ``distprune --help`` says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from inspect import cleandoc
from typing import Annotated, Any

import typer

import distprune
from distprune.cli import exits, ranks, streams
from distprune.cli.commands import (
    apply,
    calibrate,
    convert,
    diff,
    env,
    eval,
    inspect,
    plan,
    prune,
    recipe,
    selftest,
    verify,
)
from distprune.cli.streams import printable

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
    "Prune": (plan.plan, prune.prune, apply.apply, convert.convert),
    "Language models": (eval.evaluate, calibrate.calibrate),
    "Look": (inspect.inspect, verify.verify, diff.diff),
    "Recipes and support": (env.env,),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        _name = "eval" if _command is eval.evaluate else None
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


app.add_typer(recipe.app, name="recipe", rich_help_panel="Recipes and support")


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
    try:
        # typer.Exit in a command is what comes back.
        code = app(
            args=list(arguments), prog_name="distprune", obj=list(arguments), standalone_mode=False
        )
    except typer.Abort:
        return exits.INTERRUPTED
    except _ParserError as error:
        if not ranks.is_leader():  # all ranks have the same command line
            return exits.USAGE
        _show_usage(error)
        if streams.wants_json(arguments):
            # Without a command, the message is empty.
            text = printable(error.format_message()) or "no command is given."
            streams.write_document(json.dumps({"exit_code": exits.USAGE, "error": text}) + "\n")
        return exits.USAGE
    return code if isinstance(code, int) else exits.OK


def _show_usage(error: Any) -> None:
    """Write wrong usage to stderr, as typer does."""
    error.message = printable(error.message)
    try:
        from typer.rich_utils import rich_format_error
    except ImportError:
        error.show()
    else:
        rich_format_error(error)
