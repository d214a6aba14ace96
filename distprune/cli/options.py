"""Options of commands: each is a field of a pydantic model, which has its type, default and help.

The keys of a recipe are options because :class:`Recipe` is one of these models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from distprune.cli.console import Terminal
from distprune.files.errors import SelectionError, translated
from distprune.recipes import Recipe, make_recipe, problems_of, read_keys

# Options that are not named after their fields, which are the plural, or would hide a function.
_NAMES = {
    "as_json": "json", "eval_texts": "eval", "texts": "text", "rounds": "round",
    "input_dims": "input-dim", "patterns": "pattern",
}  # fmt: skip
_SHORT = {"sparsity": "-s", "recipe": "-r", "verbose": "-v", "quiet": "-q"}
# What comes first in the help of commands that have a recipe; the rest is under "More".
_ESSENTIAL = ("recipe", "sparsity", "pattern", "texts", "eval_texts")
# What only a file or a program can say.
_NO_OPTIONS = ("schedule", "names", "groups")


class Options(BaseModel):
    """The options of every command; the description of a field is its help."""

    model_config = ConfigDict(frozen=True)

    as_json: bool = Field(False, description="Write one JSON document to stdout.")
    quiet: bool = Field(False, description="Write only errors to stderr.")

    def terminal(self) -> Terminal:
        """What the command writes to."""
        return Terminal(self.as_json, self.quiet)


class ListingOptions(Options):
    """Those of commands that list tensors."""

    verbose: bool = Field(False, description="List every tensor.")


class RanksOptions(Options):
    """Those of commands that run on several processes."""

    timeout: float = Field(600.0, ge=1, description="Seconds until a silent rank is lost (600).")


class WritingOptions(ListingOptions, RanksOptions):
    """How a result is written, and what becomes of results at its place."""

    discard: bool = Field(False, description="Only remove the unfinished result beside DST.")
    force: bool = Field(False, description="Replace a finished result at DST.")


class Command(click.Command):
    """A command whose function gets its options as one model, ``given``.

    Args:
        model: of the options. If it has ``recipe``, the keys of a recipe are options, too, and the
            function also gets ``keys``: those that options give.
    """

    def __init__(self, *args: Any, model: type[Options], **more: Any) -> None:
        super().__init__(*args, **more)
        self._model, self._has_recipe = model, "recipe" in model.model_fields
        fields = (Recipe.model_fields if self._has_recipe else {}) | model.model_fields
        others = sorted(fields.keys() - {*_ESSENTIAL, *_NO_OPTIONS}, key=[*fields].index)
        others.sort(key=WritingOptions.model_fields.__contains__)
        for name in (*filter(fields.__contains__, _ESSENTIAL), *others):
            self.params.append(_option(name, fields[name]))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # for a completion; nothing is called
            return rest
        told: dict[str, Any] = {}
        for option in [param.name for param in self.params if isinstance(param, click.Option)]:
            value = ctx.params.pop(option)
            if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE:
                told[option] = value
        own = {name: told.pop(name) for name in self._model.model_fields if name in told}
        try:
            ctx.params["given"] = self._model(**own)
        except ValidationError as error:
            problems = problems_of(error, option_name)
            raise SelectionError("\n  - ".join(["wrong options:", *problems])) from error
        if self._has_recipe:
            ctx.params["keys"] = told
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": [], "More": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                is_first = not self._has_recipe or param.name in _ESSENTIAL
                sections["Options" if is_first else "More"].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def command(
    name: str, model: type[Options], *paths: str
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function a command with the options of a model; see :class:`Command`.

    Args:
        paths: its arguments, such as "SRC" for ``src``; in brackets those that may be left out.
    """
    arguments = [
        click.Argument([path.strip("[]").lower()], metavar=path, type=Path, required=path[0] != "[")
        for path in paths
    ]
    return click.command(name, cls=Command, model=model, params=arguments)


def _option(name: str, field: FieldInfo) -> click.Option:
    kind = _kind(field.annotation)
    is_repeated = get_origin(kind) in (tuple, dict)
    if is_repeated:
        kind = _kind(get_args(kind)[0])
    option = option_name(name)
    if kind is bool and field.default is not False:
        option += f"/--no-{option[2:]}"
    return click.Option(
        [*([_SHORT[name]] if name in _SHORT else []), option, name],
        type=click.Choice(get_args(kind)) if get_origin(kind) is Literal else kind,
        metavar="FILE" if name == "recipe" else "NAME" if len(get_args(kind)) > 6 else None,
        is_flag=kind is bool,
        multiple=is_repeated,
        required=field.is_required(),
        help=field.description,
    )


def _kind(annotation: Any) -> Any:
    """The type of an option, without what is optional and what constrains it."""
    if get_origin(annotation) in (None, tuple, dict, Literal):
        return annotation
    return _kind(next(kind for kind in get_args(annotation) if kind is not NoneType))


def option_name(field: str) -> str:
    """The option of a field."""
    return "--" + _NAMES.get(field, field).replace("_", "-")


def make_recipe_from(name: str | None, keys: Mapping[str, Any], **defaults: Any) -> Recipe:
    """The recipe that a file and options say together; an option replaces the file's key.

    Args:
        name: of the file or a shipped recipe.
        keys: what options say.
        defaults: keys of a recipe without groups that has not got them.

    Raises:
        SelectionError: the options contradict the file, or each other; or the file is no recipe.
    """
    options = dict(keys)
    if "input_dims" in options:
        options["input_dims"] = dims_by_pattern(options["input_dims"])
    texts = ", ".join(map(option_name, options))
    with translated(SelectionError):
        merged = ({} if name is None else read_keys(name)) | options
        if "groups" not in merged:
            merged = defaults | merged
            merged.setdefault("score", "given" if "scores" in options else "magnitude")
        return make_recipe(merged, " with ".join(filter(None, (name, texts))))


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
