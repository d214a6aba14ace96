"""What to prune and how much: the options for it, over a recipe, as a checked FileRecipe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any

import typer

from distprune.cli import recipes
from distprune.files.errors import SelectionError
from distprune.files.recipe import FileRecipe
from distprune.recipe import Recipe
from distprune.schedule.functions import OneShot

_PANEL = "What to prune (each option takes the place of what the recipe says)"


def _option(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_PANEL, show_default=False, **more)


RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        help="A YAML file, or the name of a shipped recipe (`distprune recipe ls`).",
        metavar="FILE|NAME",
        rich_help_panel=_PANEL,
        autocompletion=recipes.complete,
    ),
]
Sparsity = Annotated[
    float | None, _option("--sparsity", "-s", help="The share to prune, 0 to 1; exact.")
]
Pattern = Annotated[
    str | None,
    _option("--pattern", help="Keep N of every M inputs, as in 2:4.", metavar="N:M"),
]
Scope = Annotated[
    str | None,
    _option(
        "--scope",
        help="Rank together: everything, each tensor, or each output row.",
        metavar="global|layer|row",
    ),
]
Score = Annotated[
    str | None, _option("--score", help="What ranks weights.", metavar="magnitude|random")
]
Seed = Annotated[int | None, _option("--seed", help="Of random scores.")]
Include = Annotated[
    list[str] | None,
    _option(
        "--include",
        help="Prune tensors whose whole name matches a glob, or an expression after re:. Repeat it "
        "for more. Without it: matrices that are no embedding, head, norm, router or bias.",
        metavar="PATTERN",
    ),
]
Exclude = Annotated[
    list[str] | None,
    _option(
        "--exclude", help="Leave out tensors that match. Repeat it for more.", metavar="PATTERN"
    ),
]
MinNdim = Annotated[
    int | None, _option("--min-ndim", help="Leave out tensors of fewer dimensions (2).")
]
Nan = Annotated[
    str | None, _option("--nan", help="What a NaN among weights is.", metavar="error|keep")
]


@dataclass(frozen=True)
class CommandRecipe(FileRecipe):
    """A FileRecipe whose text is a recipe that ``-r`` reads again."""

    def as_mapping(self) -> dict[str, Any]:
        """The keys of a recipe, every default filled in."""
        values: dict[str, Any] = {"version": 1, "score": self.score}
        if self.seed is not None:
            values["seed"] = self.seed
        if self.pattern is not None:
            values["pattern"] = self.pattern
        else:
            values |= {"scope": self.scope, "sparsity": self.sparsity}
        select: dict[str, Any] = {"min_ndim": self.min_ndim}
        if self.include is not None:
            select["include"] = list(self.include)
        if self.exclude:
            select["exclude"] = list(self.exclude)
        return values | {"select": select, "nan": self.nan, "output": {"masks": self.masks}}

    def to_yaml(self) -> str:
        """The recipe with all defaults, as a YAML file: each value is JSON, which YAML contains."""
        return "".join(f"{key}: {_as_yaml(value)}\n" for key, value in self.as_mapping().items())


def resolve(name: str | None, options: dict[str, Any]) -> CommandRecipe:
    """A recipe with what the options say instead.

    Args:
        name: of a recipe, or its file; None: the options say it all.
        options: fields of FileRecipe; None where an option was not given.

    Raises:
        SelectionError: no such recipe, or one of no use here; with every value that is wrong.
    """
    given = {key: value for key, value in options.items() if value is not None and value != []}
    fields = {} if name is None else _fields(name, recipes.read(name))
    if "pattern" in given:
        fields = {k: v for k, v in fields.items() if k not in ("sparsity", "scope")}
    elif "sparsity" in given or "scope" in given:
        fields.pop("pattern", None)
    if given.get("score") == "magnitude":
        fields.pop("seed", None)
    for key in ("include", "exclude"):
        if key in given:
            given[key] = tuple(given[key])
    return CommandRecipe(**fields | given)


def _fields(name: str, recipe: Recipe) -> dict[str, Any]:
    """A recipe as fields of FileRecipe, if it is for a checkpoint."""
    group, problems = recipe.groups[0], []
    if len(recipe.groups) > 1:
        problems.append("groups")
    if not isinstance(group.schedule, OneShot):
        problems.append("schedule")
    if (group.min_sparsity, group.max_sparsity) != (0.0, 1.0):
        problems.append("limits")
    if group.names != ("weight",):
        problems.append("select.names")
    if problems:
        raise SelectionError(
            f"the recipe {name} has {', '.join(problems)}, which a checkpoint has no use for: it "
            "is pruned at once, and patterns match whole names of tensors. Expected 'sparsity' or "
            "'pattern', and 'select' with 'include' and 'exclude'.",
        )
    fields: dict[str, Any] = {
        "score": group.method, "seed": recipe.seed, "include": group.include,
        "exclude": group.exclude, "nan": recipe.nan, "masks": recipe.masks,
    }  # fmt: skip
    if group.min_ndim is not None:
        fields["min_ndim"] = group.min_ndim
    if recipe.pattern is not None:
        return fields | {"pattern": "{}:{}".format(*recipe.pattern)}
    sparsity = group.schedule.sparsity_at(group.schedule.step)
    return fields | {"scope": recipe.scope, "sparsity": sparsity}


def _as_yaml(value: Any) -> str:
    if isinstance(value, float):
        text = format(Decimal(repr(value)), "f")  # YAML takes 1e-05 for text
        return text if "." in text else text + ".0"
    return json.dumps(value)
