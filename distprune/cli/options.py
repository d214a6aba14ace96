"""Options that several commands have, each described once; those of a recipe make a FileRecipe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from distprune.cli.console import Terminal
from distprune.files.errors import SelectionError
from distprune.files.recipe import FileRecipe
from distprune.recipes import (
    BUDGET_FROM_STATISTICS,
    FROM_FILES,
    FROM_STATISTICS,
    default_normalization,
    is_normalizable,
)
from distprune.recipes.request import Request, shipped_recipes


def option(help: str, default: Any = None, *short: str, **more: Any) -> Any:
    """A field of a class of options; the option is named after it, and after a short name."""
    settings = {"help": help, "short": short, "show_default": default is not None, **more}
    return dataclasses.field(default=default, metadata=settings)


def same_option(kind: Any, name: str) -> Any:
    """A field that is an option of another class, too."""
    field = kind.__dataclass_fields__[name]
    return dataclasses.field(default=field.default, metadata=field.metadata)


def argument(metavar: str, help: str) -> Any:
    """An argument without a default."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


Source = Annotated[
    Path,
    argument(
        "SRC",
        "A folder with safetensors files, such a file, or the name of a model that is in the local "
        "Hugging Face cache (org/name).",
    ),
]
Destination = Annotated[Path, argument("DST", "A new folder, created when everything is done.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1, help="Seconds after which a rank of torchrun that is silent is lost."
    ),
]


@dataclass(frozen=True)
class OutputOptions:
    """What a command writes to stdout and stderr."""

    as_json: AsJson = False
    verbose: int = option("List every tensor.", 0, "-v", count=True, show_default=False)
    quiet: bool = option("Write errors only to stderr.", False, "-q")

    def terminal(self, *, is_leader: bool = True) -> Terminal:
        """What the command writes to."""
        return Terminal(self.as_json, -1 if self.quiet else self.verbose, is_leader=is_leader)


@dataclass(frozen=True)
class WritingOptions:
    """How a result is written, and what becomes of results at its place."""

    timeout: Timeout = 600.0
    discard: bool = option(
        "Only remove the unfinished result of an interrupted run beside DST.", False
    )
    force: bool = option(
        "Replace a finished result of distprune at DST; it stays until the new one is ready.", False
    )


# Options whose fields have other names, since a word is taken or means several values.
_NAMES = {
    "as_json": "json",
    "eval_text": "eval",
    "input_dims": "input-dim",
    "round_shares": "round",
    "texts": "text",
}


def name_of(field: str) -> str:
    """The option of a field."""
    return "--" + _NAMES.get(field, field).replace("_", "-")


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer read the fields of a command's parameters that are classes of options."""
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if dataclasses.is_dataclass(parameter.annotation):
            kinds[name] = parameter.annotation
            parameters += _parameters_of(kinds[name])
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def read(**values: Any) -> None:
        for name, kind in kinds.items():
            own = [field.name for field in dataclasses.fields(kind)]
            values[name] = kind(**{key: values.pop(key) for key in own})
        command(**values)

    vars(read)["__signature__"] = signature.replace(parameters=parameters)
    return read


def _parameters_of(kind: Any) -> Iterator[inspect.Parameter]:
    """What typer reads of a class of options, all of which its PANEL in the help shows."""
    types = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        annotation, settings = types[field.name], dict(field.metadata)
        if settings:
            names = name_of(field.name), *settings.pop("short")
            settings["rich_help_panel"] = getattr(kind, "PANEL", None)
            annotation = Annotated[annotation, typer.Option(*names, **settings)]
        is_needed = field.default is dataclasses.MISSING
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if is_needed else field.default,
            annotation=annotation,
        )


R = TypeVar("R", bound=Request)


def complete(incomplete: str) -> list[str]:
    """Names of shipped recipes, for completion; the shell completes names of files by itself."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


def find(name: str) -> Path:
    """The file of a recipe, by the name of a shipped one or by path."""
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if not path.is_file():
        raise SelectionError(
            f"{name!r} is neither a file nor a shipped recipe; expected a YAML file, or one of "
            f"{', '.join(shipped)}.",
        )
    return path


def read(name: str, kind: type[R]) -> R:
    """A checked recipe of a kind, for models or for checkpoints, by path or name."""
    path = find(name)
    try:
        return kind.load(path)
    except ImportError as error:
        raise SelectionError(
            "recipes need PyYAML and pydantic: pip install 'distprune[cli]'"
        ) from error
    except ValueError as error:
        raise SelectionError(str(error)) from error
    except OSError as error:
        raise SelectionError(f"{path} cannot be read: {error.strerror}.") from error


_PANEL = "What to prune (options override the recipe)"
_DIVIDING = ("min_sparsity", "max_sparsity", "budget")  # one ranking among its tensors
_FOR_ALL_GROUPS = ("seed", "nan", "masks", "card", "statistics", "scores")

RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        help="A YAML file, or the name of a shipped recipe (`distprune recipe ls`).",
        metavar="FILE|NAME",
        rich_help_panel=_PANEL,
        autocompletion=complete,
    ),
]


@dataclass(frozen=True)
class RecipeOptions:
    """The options of a recipe, named after the fields that they override."""

    PANEL = _PANEL

    sparsity: float | None = option("The share to prune, 0 to 1; exact.", None, "-s")
    pattern: str | None = option("Keep N of every M inputs, as in 2:4.", metavar="N:M")
    scope: str | None = option(
        "What is ranked together: everything, each tensor, or each output row.",
        metavar="global|layer|row",
    )
    score: str | None = option(
        "What ranks weights: magnitude, random, wanda (|w| times the rms of its input), stade "
        "(times the standard deviation), ria (the relative importance of |w| times the rms) or "
        "fisher (by factors), these four by --statistics; taylor and elementwise_fisher (by the "
        "gradient of each weight) by --text; or given (the |score| of --scores).",
        metavar="SCORE",
    )
    statistics: Path | None = option(
        "Statistics of activations for wanda, stade, ria and the budget owl, as `distprune "
        "calibrate` writes them; for fisher of gradients (calibrate --gradients).",
        metavar="FILE",
    )
    scores: Path | None = option(
        "Scores that were made elsewhere, a folder of safetensors files or one file: a tensor of "
        "the same name and shape for each pruned one.",
        metavar="FOLDER",
    )
    budget: str | None = option(
        "How the pruned weights are divided among the tensors, instead of by one ranking of all: "
        "uniform, erk, or owl, by --statistics.",
        metavar="RULE",
    )
    normalize: str | None = option(
        "What scores are divided by before all tensors are ranked together: the rms of their "
        "tensor (the default), its l2 norm, its mean, or nothing.",
        metavar="rms|l2|mean|none",
    )
    seed: int | None = option("Of random scores.")
    include: list[str] | None = option(
        "Prune tensors whose whole name matches a glob, or an expression after re:. Repeat it for "
        "more. Without it: matrices that are no embedding, head, norm, router or bias.",
        metavar="PATTERN",
    )
    also: list[str] | None = option(
        "Prune matching tensors in addition to the default of --include. Repeat it for more.",
        metavar="PATTERN",
    )
    exclude: list[str] | None = option(
        "Leave out tensors that match. Repeat it for more.", metavar="PATTERN"
    )
    min_ndim: int | None = option("Leave out tensors of fewer dimensions larger than 1 (2).")
    min_sparsity: float | None = option(
        "Of every single tensor, at least; the total stays exact (0)."
    )
    max_sparsity: float | None = option(
        "Of every single tensor, at most; the total stays exact (1)."
    )
    input_dims: list[str] | None = option(
        "The dimension of the inputs of tensors, from 0, for patterns and rows: "
        "'*.c_fc.weight=0'; of a convolution with its kernel: 0,2,3. Repeat it for more.",
        metavar="PATTERN=DIM",
    )
    nan: str | None = option("What to do about NaN in weights.", metavar="error|keep")


def resolve(name: str | None, options: Mapping[str, Any]) -> FileRecipe:
    """A recipe, overridden by options."""
    recipe = None if name is None else read(name, FileRecipe)
    overrides = {key: value for key, value in options.items() if value is not None and value != []}
    if recipe is not None and not overrides:
        return recipe
    given = {key: name_of(key) for key in overrides}
    overrides |= {key: str(overrides[key]) for key in ("statistics", "scores") if key in overrides}
    fields = {} if recipe is None else _fields_of(recipe)
    if groups := fields.get("groups", ()):
        if taken := [text for key, text in given.items() if key not in _FOR_ALL_GROUPS]:
            raise SelectionError(
                f"the recipe {name} has {len(groups)} groups, each of which has its own; expected "
                f"no {', '.join(taken)}. Change the recipe, or leave the recipe out."
            )
    else:
        if "scores" in overrides:
            overrides.setdefault("score", "given")
        if "input_dims" in overrides:
            overrides["input_dims"] = dims_by_pattern(overrides["input_dims"])
        fields = _left(fields, overrides)
    try:
        return FileRecipe(**fields | overrides)
    except SelectionError as error:
        if name is None or not given:
            raise
        subject = f"the recipe {name} with {' '.join(given.values())}"
        raise SelectionError(f"{subject}: {error}") from error
    except ImportError as error:
        raise SelectionError("recipes need pydantic: pip install 'distprune[cli]'") from error


def _left(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe without those that options replace, or that have no effect beside."""
    gone: set[str] = set()
    if "pattern" in overrides:
        gone = {"sparsity", "scope", *_DIVIDING}
    elif "sparsity" in overrides:
        gone = {"pattern"}
    if overrides.get("scope", "global") != "global":
        gone |= {*_DIVIDING}
    if "budget" in overrides and "scope" not in overrides:
        gone.add("scope")
    left = {key: value for key, value in fields.items() if key not in gone}
    values = left | overrides
    if "score" in overrides:
        used = {
            "random": "seed",
            **dict.fromkeys(FROM_FILES, "scores"),
            **dict.fromkeys(FROM_STATISTICS, "statistics"),
        }
        for key in {"seed", "statistics", "scores"} - {used.get(values["score"])}:
            if key != "statistics" or values.get("budget") != BUDGET_FROM_STATISTICS:
                left.pop(key, None)
    if is_normalizable(*map(values.get, ("scope", "pattern", "budget", "score"))):
        default = default_normalization(values.get("score"))
        return {"normalize": None if default == "none" else default} | left
    left.pop("normalize", None)
    return left


def _fields_of(recipe: FileRecipe) -> dict[str, Any]:
    """The fields of a recipe that are not those of every recipe, as arguments of FileRecipe."""
    values = {
        field.name: getattr(recipe, field.name)
        for field in dataclasses.fields(recipe)
        if getattr(recipe, field.name) != field.default
    }
    if recipe.is_normalizable:
        values["normalize"] = recipe.normalize
    if recipe.groups:  # what the recipe as a whole says of them may be overridden
        own = {"seed": None, "nan": "error", "masks": True, "card": True}
        values["groups"] = [group.replaced(**own) for group in recipe.groups]
    return values


def dims_by_pattern(options: list[str]) -> dict[str, tuple[int, ...]]:
    """``--input-dim`` options as the field ``input_dims`` of a recipe."""
    dims = {}
    for option in options:
        if not re.fullmatch(r".+=\d+(,\d+)*", option):
            raise SelectionError(
                f"--input-dim {option}: expected PATTERN=DIM, such as '*.c_fc.weight=0'; DIM may "
                "be several numbers separated by commas."
            )
        pattern, _, text = option.rpartition("=")
        dims[pattern] = tuple(map(int, text.split(",")))
    return dims
