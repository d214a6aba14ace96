"""Options that several commands have, each described once; those of a recipe make a FileRecipe."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from distprune.cli.console import Terminal
from distprune.files.errors import SelectionError, headline
from distprune.files.recipe import FileRecipe
from distprune.recipes import (
    BUDGET_FROM_STATISTICS,
    FROM_FILES,
    FROM_STATISTICS,
    default_normalization,
    is_normalizable,
    is_tiled,
)
from distprune.recipes.request import Request, shipped_recipes


def option(*names: str, help: str, **more: Any) -> Any:
    """An option whose default the help does not show; it says it in words where it matters."""
    return typer.Option(*names, help=help, show_default=False, **more)


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
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Write errors only to stderr.")]
Plot = Annotated[
    Path | None,
    option(
        "--plot",
        help="Draw sparsity by layer and kind, and a histogram of magnitudes (needs matplotlib).",
        metavar="FILE.png|svg|pdf",
    ),
]
Nproc = Annotated[
    int | None,
    option("--nproc", min=1, help="Share the work among this many processes on this machine."),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1, help="Seconds after which a rank that does not respond is lost."
    ),
]
FollowLinks = Annotated[
    bool,
    typer.Option(
        "--follow-links",
        help="Also copy the targets of links in SRC that are outside of SRC and its Hugging Face "
        "cache.",
    ),
]


@dataclass(frozen=True)
class OutputOptions:
    """What a command writes to stdout and stderr."""

    as_json: AsJson = False
    verbose: Annotated[int, option("--verbose", "-v", count=True, help="List every tensor.")] = 0
    quiet: Quiet = False

    def terminal(self, *, is_leader: bool = True) -> Terminal:
        """What the command writes to."""
        return Terminal(self.as_json, -1 if self.quiet else self.verbose, is_leader=is_leader)


@dataclass(frozen=True)
class RankOptions:
    """The processes that share the work."""

    nproc: Nproc = None
    timeout: Timeout = 600.0


@dataclass(frozen=True)
class WritingOptions(RankOptions):
    """The processes that write a result together, and what becomes of results at its place."""

    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Take over the lock of a run that was killed on another machine."
        ),
    ] = False
    discard: Annotated[
        bool,
        typer.Option(
            "--discard", help="Only remove the unfinished result of an interrupted run beside DST."
        ),
    ] = False
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace a finished result of distprune at DST; it stays until the new one is "
            "ready.",
        ),
    ] = False


def _in_panel(annotation: Any, panel: str) -> Any:
    """An option in a panel of the help."""
    kind, info = get_args(annotation)
    info = copy(info)
    info.rich_help_panel = panel
    return Annotated[kind, info]


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Let typer read the options of a command's parameters that are dataclasses, or dicts.

    The type of each field says which option it is; the annotation of a dict has a mapping that does
    (see :data:`RecipeOptions`).
    """
    signature = inspect.signature(command, eval_str=True)
    kinds: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    parameters = []
    for name, parameter in signature.parameters.items():
        kind, *more = get_args(parameter.annotation) or (parameter.annotation,)
        if dataclasses.is_dataclass(kind):
            options = get_type_hints(kind, include_extras=True)
            defaults = {field.name: field.default for field in dataclasses.fields(kind)}
            if panel := getattr(kind, "PANEL", None):
                options = {key: _in_panel(each, panel) for key, each in options.items()}
        elif more and isinstance(more[0], dict):
            options, defaults, kind = more[0], {}, dict
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        kinds[name] = kind, list(options)
        for key, annotation in options.items():
            default = defaults.get(key)
            default = parameter.empty if default is dataclasses.MISSING else default
            parameters.append(
                inspect.Parameter(
                    key, parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
            )

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, (kind, keys) in kinds.items():
            values[name] = kind(**{key: values.pop(key) for key in keys})
        command(**values)

    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    return run


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
# The options of a recipe, by the fields that they override: type, help, and what a value is called.
_OF_RECIPE: dict[str, tuple[Any, str, str | None]] = {
    "sparsity": (float, "The share to prune, 0 to 1; exact.", None),
    "pattern": (
        str,
        "Keep N of every M inputs, as in 2:4; or, beside --sparsity, prune whole tiles of A "
        "outputs and B inputs, as in 4x4.",
        "N:M|AxB",
    ),
    "scope": (
        str,
        "What is ranked together: everything, each tensor, or each output row; of tiles, the tiles "
        "of the same outputs.",
        "global|layer|row",
    ),
    "score": (
        str,
        "What ranks weights: magnitude, random, wanda (|w| times the rms of its input), stade "
        "(times the standard deviation), ria (the relative importance of |w| times the rms) or "
        "fisher (by factors), these four by --statistics; taylor and elementwise_fisher (by the "
        "gradient of each weight) by --text; or given (the |score| of --scores).",
        "SCORE",
    ),
    "statistics": (
        Path,
        "Statistics of activations for wanda, stade, ria and the budget owl, as `distprune "
        "calibrate` writes them; for fisher of gradients (calibrate --gradients).",
        "FILE",
    ),
    "scores": (
        Path,
        "Scores that were made elsewhere, a folder of safetensors files or one file: a tensor of "
        "the same name and shape for each pruned one.",
        "FOLDER",
    ),
    "budget": (
        str,
        "How the pruned weights are divided among the tensors, instead of by one ranking of all: "
        "uniform, uniform+, erk, lamp, or owl, by --statistics.",
        "RULE",
    ),
    "normalize": (
        str,
        "What scores are divided by before all tensors are ranked together: the rms of their "
        "tensor (the default), its l2 norm, its mean, or nothing.",
        "rms|l2|mean|none",
    ),
    "seed": (int, "Of random scores.", None),
    "include": (
        list[str],
        "Prune tensors whose whole name matches a glob, or an expression after re:. Repeat it for "
        "more. Without it: matrices that are no embedding, head, norm, router or bias.",
        "PATTERN",
    ),
    "also": (
        list[str],
        "Prune matching tensors in addition to the default of --include. Repeat it for more.",
        "PATTERN",
    ),
    "exclude": (list[str], "Leave out tensors that match. Repeat it for more.", "PATTERN"),
    "min_ndim": (int, "Leave out tensors of fewer dimensions larger than 1 (2).", None),
    "min_sparsity": (float, "Of every single tensor, at least; the total stays exact (0).", None),
    "max_sparsity": (float, "Of every single tensor, at most; the total stays exact (1).", None),
    "input_dims": (
        list[str],
        "The dimension of the inputs of tensors, from 0, for patterns and rows: "
        "'*.c_fc.weight=0'; of a convolution with its kernel: 0,2,3. Repeat it for more.",
        "PATTERN=DIM",
    ),
    "nan": (str, "What to do about NaN in weights.", "error|keep"),
}


def _name_of(field: str) -> str:
    """The option of a field: a repeated one is named after one of its values."""
    return "--" + field.replace("input_dims", "input_dim").replace("_", "-")


OPTIONS: dict[str, Any] = {
    field: Annotated[
        kind | None,
        option(
            _name_of(field),
            *(["-s"] if field == "sparsity" else []),
            help=text,
            metavar=metavar,
            rich_help_panel=_PANEL,
        ),
    ]
    for field, (kind, text, metavar) in _OF_RECIPE.items()
}


RecipeOptions = Annotated[dict[str, Any], OPTIONS]


def resolve(name: str | None, options: dict[str, Any]) -> FileRecipe:
    """A recipe, overridden by options."""
    recipe = None if name is None else read(name, FileRecipe)
    overrides = {key: value for key, value in options.items() if value is not None and value != []}
    if recipe is not None and not overrides:
        return recipe
    _check_of_users(overrides)
    given = _as_typed(overrides)
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
        _check_amount(name, fields | overrides, given)
    try:
        return FileRecipe(**fields | overrides)
    except SelectionError as error:
        if name is None or not given:
            raise
        subject = f"the recipe {name} with {' '.join(given.values())}"
        raise SelectionError(headline(subject, error.problems), error.problems) from error
    except ImportError as error:
        raise SelectionError("recipes need pydantic: pip install 'distprune[cli]'") from error


# Scores of live models.
_OF_MODELS = ("snip", "movement", "grasp", "synflow", "gradient", "obs", "sparsegpt")


def _check_of_users(overrides: dict[str, Any]) -> None:
    """Say what was probably meant by a percentage, or by a score that files do not have."""
    share, score = overrides.get("sparsity"), overrides.get("score")
    if share is not None and 1 < share <= 100:
        raise SelectionError(
            f"--sparsity {share:g}: expected a number from 0 to 1; did you mean {share / 100:g}?"
        )
    if score in _OF_MODELS:
        raise SelectionError(
            f"--score {score} is of live models: criteria and statistics of the library, or "
            "launch/prune_language_model.py. Expected fisher with --text FILE, which ranks a "
            "checkpoint by gradients, too."
        )


def _left(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe without those that options replace, or that have no effect beside."""
    gone: set[str] = set()
    has_tiles = is_tiled((fields | overrides).get("pattern"))
    if "pattern" in overrides and not has_tiles:
        gone = {"sparsity", "scope", *_DIVIDING}
    elif "sparsity" in overrides and not has_tiles:
        gone = {"pattern"}
    if has_tiles or overrides.get("scope", "global") != "global":
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


def _check_amount(name: str | None, values: dict[str, Any], given: dict[str, str]) -> None:
    """Check that a sparsity or a pattern is given, and no scope beside a pattern N:M."""
    pattern = values.get("pattern")
    if "scope" in given and pattern is not None and not is_tiled(pattern):
        beside, way_out = given.get("pattern"), "leave --scope out."
        if beside is None:
            beside = f"the pattern {pattern} of the recipe {name}"
            way_out = "expected --sparsity too, which replaces the pattern, or no --scope."
        raise SelectionError(
            f"{given['scope']} has no place beside {beside}, which says how much and where; "
            f"{way_out}"
        )
    if pattern is None and "sparsity" not in values:
        raise SelectionError(
            "neither sparsity nor pattern is given; expected --sparsity, --pattern or --recipe."
        )
    if is_tiled(pattern) and "sparsity" not in values:
        raise SelectionError(
            f"the pattern {pattern} has no sparsity; expected --sparsity, the share of the tiles "
            "to prune."
        )


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


def _as_typed(overrides: dict[str, Any]) -> dict[str, str]:
    """Options as they stand on a command line, by their fields."""
    texts = {}
    for key, value in overrides.items():
        name = _name_of(key)
        if isinstance(value, bool):
            texts[key] = name if value else f"--no-{name[2:]}"
        else:
            values = value if isinstance(value, list) else [value]
            texts[key] = " ".join(f"{name} {each}" for each in values)
    return texts


def dims_by_pattern(options: list[str]) -> dict[str, tuple[int, ...]]:
    """``--input-dim`` options as the field ``input_dims`` of a recipe."""
    dims = {}
    for option in options:
        pattern, _, text = option.rpartition("=")
        try:
            dims[pattern] = tuple(map(int, text.split(",")))
        except ValueError:
            pattern = ""
        if not pattern:
            raise SelectionError(
                f"--input-dim {option}: expected PATTERN=DIM, such as '*.c_fc.weight=0'; DIM may "
                "be several numbers separated by commas."
            )
    return dims
