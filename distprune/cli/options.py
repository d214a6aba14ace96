"""Options of commands: each is a field of a pydantic model, which has its type, default and help.

The keys of a recipe are options because :class:`Recipe` is one of these models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from distprune.cli.console import Terminal
from distprune.files.errors import SelectionError
from distprune.recipes import Recipe, shipped_recipes
from distprune.recipes.loading import make_recipe, problems_of, read_keys

# Options that are not named after their fields, which are the plural, or would hide a function.
_NAMES = {
    "as_json": "json", "eval_texts": "eval", "texts": "text", "rounds": "round",
    "input_dims": "input-dim", "patterns": "pattern",
}  # fmt: skip
_SHORT = {"sparsity": "-s", "recipe": "-r", "verbose": "-v", "quiet": "-q"}
# What comes first in the help of plan and prune.
ESSENTIAL = ("recipe", "sparsity", "pattern", "texts", "eval_texts")
# What only a file or a program can say.
_NO_OPTIONS = ("schedule", "names", "groups")


class Options(BaseModel):
    """A group of options; the description of a field is its help."""

    model_config = ConfigDict(frozen=True)


class OutputOptions(Options):
    """What a command writes to stdout and stderr."""

    as_json: bool = Field(default=False, description="Write one JSON document to stdout.")
    verbose: bool = Field(default=False, description="List every tensor.")
    quiet: bool = Field(default=False, description="Write only errors to stderr.")

    def terminal(self) -> Terminal:
        """What the command writes to."""
        return Terminal(self.as_json, self.quiet)


class WritingOptions(Options):
    """How a result is written, and what becomes of results at its place."""

    timeout: float = Field(
        default=600.0, ge=1, description="Seconds after which a silent rank is lost (600)."
    )
    discard: bool = Field(
        default=False, description="Only remove the unfinished result beside DST."
    )
    force: bool = Field(default=False, description="Replace a finished result at DST.")


Group = TypeVar("Group", bound=BaseModel)


class Command(click.Command):
    """A command that has the options of some models.

    ``context.obj`` has what was given, by model: a dictionary without defaults, which :func:`made`
    turns into the model.

    Args:
        models: in the order of the help.
        first: fields that come first in the help; the others are under "More". Without any, all
            are in one list.
    """

    def __init__(
        self, *args: Any, models: Sequence[type[BaseModel]], first: Sequence[str] = (), **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._models, self._first = models, first
        self.params += [
            _option(name, field.annotation, field.default, field.description)
            for model in models
            for name, field in model.model_fields.items()
            if name not in _NO_OPTIONS
        ]

    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = {
            model: {
                name: value
                for name in model.model_fields
                if name in ctx.params
                for value in [ctx.params.pop(name)]
                if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            }
            for model in self._models
        }
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        first: list[tuple[str, str]] = []
        more: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                is_first = not self._first or param.name in self._first
                (first if is_first else more).append(record)
        for title, records in (("Options", first), ("More", more)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def command(
    name: str, *models: type[BaseModel], first: Sequence[str] = ()
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a command; its first argument is the context."""

    def decorate(function: Callable[..., None]) -> click.Command:
        make = click.command(name, cls=Command, models=models, first=first)
        return make(click.pass_context(function))

    return decorate


source = click.argument("source", metavar="SRC", type=Path)
destination = click.argument("destination", metavar="DST", type=Path)


def complete(context: click.Context, option: click.Parameter, text: str) -> list[str]:
    """Names of shipped recipes, for completion; the shell completes names of files by itself."""
    return [name for name in shipped_recipes() if name.startswith(text)]


recipe_option = click.option(
    "-r",
    "--recipe",
    metavar="FILE",
    help="YAML file, or the name of a shipped recipe.",
    shell_complete=complete,
)


def _option(name: str, annotation: Any, default: Any, help: str | None) -> click.Option:
    kind = _kind(annotation)
    is_repeated = get_origin(kind) in (tuple, dict)
    if is_repeated:
        kind = _kind(get_args(kind)[0])
    option = option_name(name)
    if kind is bool and default is True:
        option += f"/--no-{option[2:]}"
    return click.Option(
        [*([_SHORT[name]] if name in _SHORT else []), option, name],
        type=click.Choice(get_args(kind)) if get_origin(kind) is Literal else kind,
        metavar="NAME" if len(get_args(kind)) > 6 else None,
        is_flag=kind is bool,
        multiple=is_repeated,
        help=help,
    )


def _kind(annotation: Any) -> Any:
    """The type of an option, without what is optional and what constrains it."""
    if get_origin(annotation) in (None, tuple, dict, Literal):
        return annotation
    return _kind(next(kind for kind in get_args(annotation) if kind is not NoneType))


def option_name(field: str) -> str:
    """The option of a field."""
    return "--" + _NAMES.get(field, field).replace("_", "-")


def made(context: click.Context, model: type[Group]) -> Group:
    """The options of a model, checked.

    Raises:
        SelectionError: with every option that is wrong.
    """
    try:
        return model(**context.obj[model])
    except ValidationError as error:
        raise SelectionError("wrong options:", problems_of(error, option_name)) from error


def recipe_of(context: click.Context, name: str | None, defaults: dict[str, Any]) -> Recipe:
    """The recipe that a file and the options say together; an option replaces the file's key.

    Args:
        name: of the file or a shipped recipe.
        defaults: keys of a recipe without groups that has not got them.

    Raises:
        SelectionError: the options contradict the file, or each other; or the file is no recipe.
    """
    options = dict(context.obj[Recipe])
    if "input_dims" in options:
        options["input_dims"] = dims_by_pattern(options["input_dims"])
    texts = ", ".join(map(option_name, options))
    try:
        keys = {} if name is None else read_keys(name)
        keys |= options
        if "groups" not in keys:
            keys = defaults | keys
            keys.setdefault("score", "given" if "scores" in options else "magnitude")
        return make_recipe(keys, " with ".join(filter(None, (name, texts))))
    except ValueError as error:
        raise SelectionError(str(error)) from error


def dims_by_pattern(options: Iterable[str]) -> dict[str, list[int]]:
    """``--input-dim`` options as the key ``input_dims`` of a recipe."""
    dims = {}
    for option in options:
        if not re.fullmatch(r".+=\d+(,\d+)*", option):
            raise SelectionError(
                f"--input-dim {option}: expected PATTERN=DIM, such as '*.c_fc.weight=0'; DIM may "
                "be several numbers separated by commas."
            )
        pattern, _, text = option.rpartition("=")
        dims[pattern] = [int(number) for number in text.split(",")]
    return dims
