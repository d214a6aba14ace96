"""What to do with a checkpoint: a recipe with every default filled in.

A FileRecipe is right if what it writes is right by the form of all recipes, and reading that gives
the same FileRecipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from distprune._common.element_groups import GroupRule, Scope
from distprune._recipe_form.imports import check
from distprune._recipe_form.problems import Problems, RecipeError
from distprune._recipe_form.values import FROM_STATISTICS, Statistic, n_of_m, tile_of
from distprune._recipe_form.writing import select_mapping
from distprune.files.errors import SelectionError, headline
from distprune.files.formats.yaml_text import yaml_text

if TYPE_CHECKING:
    from distprune._recipe_form.form import RecipeForm

Score = Literal["magnitude", "random", "wanda", "stade", "given"]
# What the paths of inputs become in the recipe of a result, beside which the statistics lie.
STORED_STATISTICS = "statistics.safetensors"
STORED_SCORES = "scores"


# Each group has at least one unit of work, and so one histogram; see ``ranking.units``.
MAX_GROUPS = 128
# Fields of the recipe as a whole; all others are fields of each group.
_SHARED = ("seed", "nan", "masks", "card", "groups", "statistics", "scores")
_PREFIX = re.compile(r"^(the document: |select\.|limits\.|output\.)")  # no part of a field's name


@dataclass(frozen=True)
class FileRecipe:
    """How to prune a checkpoint.

    Attributes:
        sparsity: the share of elements to prune, in [0, 1]: of all selected tensors together,
            of each tensor, or of each row, as ``scope`` says; rounded to a count, halves to even.
        scope: what is ranked together: "global" all selected tensors, "layer" each tensor, "row"
            each output row.
        pattern: instead of a sparsity, "N:M": of every M neighbours along the input dimension, N
            are kept. Or "AxB", beside a sparsity and a scope: whole tiles of A outputs and B
            inputs are pruned, those with the lowest sums of scores. Shares are of tiles.
        score: "magnitude"; "random": the numbers that ``RandomUnstructured`` would draw; "wanda":
            |w| times the rms of its input; "stade": |w| times the standard deviation of its input;
            "given": |score| of ``scores``.
        seed: of random scores; 0 by default.
        include: globs, or regular expressions after ``re:``, for whole names of tensors; None:
            matrices, except embeddings, heads, norms, routers, biases and scales.
        also: patterns of tensors to prune in addition to the default of ``include``.
        exclude: patterns of tensors to leave alone, whatever selects them.
        min_ndim: leave alone tensors of fewer dimensions; those of size 1 do not count.
        input_dims: by pattern, the dimensions that an output sums over: the one that N:M goes
            along, and the last ones, if they are the kernel of a convolution. The first pattern
            that matches counts. Needed for tensors whose layout cannot be derived. A mapping, or
            pairs; stored as pairs.
        nan: "error": a NaN in a selected tensor is an error; "keep": it is kept.
        masks: whether to write the masks.
        min_sparsity, max_sparsity: limits of every single tensor, in [0, 1], for the scope
            "global"; floors are rounded up to a count, and ceilings down. The total stays exact.
        groups: instead of a sparsity and a selection, budgets for parts of the checkpoint: recipes
            whose tensors are ranked separately. A tensor in no group is left alone, and none is
            in two. ``seed``, ``nan``, ``masks``, ``card``, ``statistics`` and ``scores``
            are those of this recipe.
        card: whether README.md of the result describes the pruning, above the text of the
            source's README.md; false copies that of the source.
        normalize: what the magnitudes of each tensor are divided by before they are ranked together
            with those of others: "rms", "l2" or "mean" (of the magnitudes); None: raw magnitudes.
            The command line and recipe files have "rms" as their default. Other scores than
            magnitudes are divided likewise.
        statistics: path of the statistics of activations that "wanda" and "stade" need, as
            ``ActivationStatistics.save`` writes them.
        scores: path of the scores for "given": a folder of safetensors files, or one file, with a
            tensor for each pruned one, of its name and shape.

    Raises:
        SelectionError: with every field that is wrong.
        ImportError: pydantic is missing.
    """

    sparsity: float | None = None
    scope: Scope = "global"
    pattern: str | None = None
    score: Score = "magnitude"
    seed: int | None = None
    include: tuple[str, ...] | None = None
    also: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    min_ndim: int = 2
    input_dims: Any = ()
    nan: Literal["error", "keep"] = "error"
    masks: bool = True
    min_sparsity: float = 0.0
    max_sparsity: float = 1.0
    groups: tuple[FileRecipe, ...] = ()
    card: bool = True
    normalize: Statistic | None = None
    statistics: str | None = None
    scores: str | None = None

    def __post_init__(self) -> None:
        problems = self._set_groups() if self.groups else []
        self._set(groups=tuple(self.groups or ()))
        for name in ("statistics", "scores"):
            if isinstance(path := getattr(self, name), os.PathLike):
                self._set(**{name: os.fspath(path)})
        if not problems:
            try:
                form = check(self.as_mapping(), Problems(), "the recipe")
            except RecipeError as error:
                problems = [_PREFIX.sub("", problem, count=1) for problem in error.problems]
            else:
                self._set_checked(form)
                if self.nan == "keep" and any(part.tile is not None for part in self.parts):
                    problems = ["nan: a tile with a NaN has no sum; expected error beside tiles."]
        if problems:
            raise SelectionError(headline("the recipe", problems), problems)

    @property
    def parts(self) -> tuple[FileRecipe, ...]:
        """The groups; this recipe itself if it has none."""
        return self.groups or (self,)

    @property
    def is_together(self) -> bool:
        """Whether all tensors are ranked together, not each of them or each row on its own."""
        return self.group_rule.is_together

    @property
    def is_normalizable(self) -> bool:
        """Whether the order of the weights depends on what each tensor is divided by."""
        return self.is_together and self.tile is None and self.score != "random"

    @property
    def ranks_magnitudes(self) -> bool:
        """Whether the score of an element is its magnitude."""
        return self.score == "magnitude"

    @property
    def needs_statistics(self) -> bool:
        """Whether scores are made of weights and of statistics of activations."""
        return self.score in FROM_STATISTICS

    @property
    def divisor_text(self) -> str:
        """What the scores of a tensor are divided by, in words."""
        mean = "mean magnitude" if self.ranks_magnitudes else "mean score"
        names = {"rms": "rms", "l2": "l2 norm", "mean": mean}
        return "" if self.normalize is None else f"{names[self.normalize]} of its tensor"

    @property
    def score_text(self) -> str:
        """What ranks the weights, in words."""
        score = "given scores" if self.score == "given" else self.score
        return score + (f" / {self.divisor_text}" if self.normalize is not None else "")

    @property
    def has_limits(self) -> bool:
        return (self.min_sparsity, self.max_sparsity) != (0.0, 1.0)

    @property
    def kept_of(self) -> tuple[int, int] | None:
        """(N, M) of the pattern."""
        if self.pattern is None or self.tile is not None:
            return None
        return n_of_m(self.pattern)

    @property
    def tile(self) -> tuple[int, int] | None:
        """(A, B) of a pattern of tiles."""
        return tile_of(self.pattern)

    @property
    def group_rule(self) -> GroupRule:
        """Which groups of elements are ranked on their own, and how many each of them loses."""
        return GroupRule(self.scope, self.sparsity, self.kept_of, self.tile)

    @property
    def goes_along_inputs(self) -> bool:
        """Whether it matters along which dimension the inputs of a tensor lie."""
        return self.group_rule.goes_along_inputs

    def as_mapping(self) -> dict[str, Any]:
        """The keys of a recipe file, every default filled in; ``parse_recipe`` reads them again.

        A recipe that ranks raw magnitudes is one of version 1, whose default that was: so the files
        of results that were made before there was another version are still what is written here.
        """
        is_raw = all(part.normalize is None for part in self.parts)
        values: dict[str, Any] = {"version": 1 if is_raw else 2}
        if self.seed is not None:
            values["seed"] = self.seed
        for name in ("statistics", "scores"):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        if self.groups:
            values["groups"] = [group._part_as_mapping(is_raw) for group in self.groups]
        else:
            values |= self._part_as_mapping(is_raw)
        return values | {"nan": self.nan, "output": {"masks": self.masks, "card": self.card}}

    def as_fields(self) -> dict[str, Any]:
        """The fields as plain values, for reports and digests.

        Without the fields of later versions that are None: reports that were made before do not
        have them.
        """
        values = asdict(self)
        for part in (values, *values["groups"]):
            for name in ("normalize", "statistics", "scores"):
                if part[name] is None:
                    del part[name]
        return values

    def as_stored(self) -> FileRecipe:
        """The recipe as it stands in a result: beside its statistics, and without other paths."""
        return replace(
            self,
            statistics=None if self.statistics is None else STORED_STATISTICS,
            scores=None if self.scores is None else STORED_SCORES,
        )

    def _part_as_mapping(self, is_raw: bool) -> dict[str, Any]:
        values: dict[str, Any] = {"score": self.score}
        if self.pattern is not None:
            values["pattern"] = self.pattern
        is_n_of_m = self.pattern is not None and self.tile is None
        if not is_n_of_m or self.scope != "global":
            values["scope"] = self.scope
        if self.normalize is not None or (not is_raw and self.is_normalizable):
            values["normalize"] = self.normalize or "none"
        if self.sparsity is not None:
            values["sparsity"] = self.sparsity
        values["select"] = {"min_ndim": self.min_ndim} | select_mapping(
            self.include, self.also, self.exclude, self.input_dims
        )
        if self.has_limits:
            limits = {"min_sparsity": self.min_sparsity, "max_sparsity": self.max_sparsity}
            values["limits"] = limits
        return values

    def to_yaml(self) -> str:
        """A recipe file with every default filled in, which ``distprune prune -r`` reads.

        A recipe with a single group is read as one without groups, which prunes the same.
        """
        return yaml_text(self.as_mapping())

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _set_checked(self, form: RecipeForm) -> None:
        """Take the values of a checked recipe, which all have the types that are declared here."""
        is_random = any(part.score == "random" for part in self.parts)
        seed = 0 if is_random and self.seed is None else self.seed
        self._set(seed=seed)
        if self.groups:
            groups = [
                replace(
                    group,
                    seed=seed if group.score == "random" else None,
                    nan=self.nan,
                    masks=self.masks,
                    card=self.card,
                )
                for group in self.groups
            ]
            # JSON has lists for tuples.
            self._set(groups=tuple(groups), also=(), exclude=(), input_dims=())
            return
        select = form.select
        self._set(
            sparsity=form.sparsity,
            pattern=form.pattern,
            include=select.include,
            also=select.also,
            exclude=select.exclude,
            input_dims=select.input_dims,
        )
        limits = form.limits
        normalize = form.resolved()[0].normalize
        self._set(normalize=None if normalize == "none" else normalize)
        self._set(
            min_sparsity=0.0 if limits is None else limits.min_sparsity,
            max_sparsity=1.0 if limits is None else limits.max_sparsity,
        )

    def _set_groups(self) -> list[str]:
        """Make FileRecipes of groups that are mappings; return what is wrong."""
        items: object = self.groups
        self._set(groups=())
        if isinstance(items, str | FileRecipe) or not isinstance(items, Sequence):
            return [f"groups is {items!r}; expected a list of recipes."]
        if len(items) > MAX_GROUPS:
            return [f"there are {len(items)} groups; expected at most {MAX_GROUPS}."]
        problems = [
            f"{field.name} is given beside groups; expected it in each of the groups."
            for field in fields(self)
            if field.name not in _SHARED
            and getattr(self, field.name) not in (field.default, [])  # JSON has no tuples
        ]
        groups = []
        for number, item in enumerate(items):
            try:
                group = item if isinstance(item, FileRecipe) else FileRecipe(**item)
            except SelectionError as error:
                problems += [f"groups[{number}]: {problem}" for problem in error.problems]
                continue
            except TypeError as error:
                problems.append(f"groups[{number}] is {item!r}; expected a recipe ({error}).")
                continue
            problems += [f"groups[{number}]: {text}" for text in self._not_shared(group)]
            groups.append(group)
        self._set(groups=tuple(groups))
        return problems

    def _not_shared(self, group: FileRecipe) -> list[str]:
        """The fields of a group that only the recipe as a whole may have."""
        allowed: dict[str, tuple[object, ...]] = {
            "groups": ((),), "masks": (True, self.masks), "card": (True, self.card),
            "nan": ("error", self.nan), "seed": (None, 0, self.seed),
            "statistics": (None,), "scores": (None,),
        }  # fmt: skip
        return [
            f"{name} is {getattr(group, name)!r}; expected it beside the groups, for all of them."
            for name, values in allowed.items()
            if getattr(group, name) not in values
        ]
