"""Request: what to prune, how much and by which score; one value for models and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from distprune.base.blocks import BlockRule, Scope, parse_pattern
from distprune.base.schedules import OneShot, Schedule, schedule_fields
from distprune.recipes import (
    BUDGET_FROM_STATISTICS,
    FROM_FILES,
    FROM_GRADIENTS,
    FROM_STATISTICS,
    Budget,
    Problems,
    RecipeError,
    Score,
    is_normalizable,
    read_yaml,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from distprune.base.exact_sums import Normalization
    from distprune.recipes.form import GroupForm, RecipeForm

# Keys of the recipe as a whole that may be left out.
_WHOLE = ("seed", "statistics", "scores")
# Fields of the request as a whole; all others are fields of each group.
_SHARED = (*_WHOLE, "nan", "masks", "card", "groups")
# Fields that a checkpoint has no use for, by their keys in a recipe.
FOR_MODELS = {"schedule": "schedule", "select.names": "names"}


@dataclass(frozen=True)
class Request:
    """What to prune, checked once: when a file, a mapping or keywords make it.

    Attributes:
        sparsity: the share of elements to prune, in [0, 1]: of all selected tensors together,
            of each tensor, or of each row, as ``scope`` says; rounded to a count, halves to even.
        scope: what is ranked together: "global" all selected tensors, "layer" each tensor, "row"
            each output row.
        pattern: instead of a sparsity, "N:M": of every M neighbours along the input dimension, N
            are kept.
        score: "magnitude"; "random": the numbers that ``RandomUnstructured`` would draw; for
            checkpoints also "wanda": |w| times the rms of its input; "stade": |w| times the
            standard deviation of its input; "ria": the relative importance of |w| times the rms
            of its input; "fisher": the root of the Fisher information by factors; "given": |score|
            of ``scores``; "taylor", |w| times the mean |gradient|, and "elementwise_fisher", w**2
            times the mean squared gradient: of ``scores``, which ``prune --text`` makes.
        seed: of random scores. None: 0 for checkpoints, torch's generator for models.
        include: globs, or regular expressions after ``re:``, for names. None: matrices, except
            embeddings, heads, norms, routers, biases and scales.
        also: patterns of tensors to prune in addition to the default of ``include``.
        exclude: patterns of tensors to leave alone, whatever selects them.
        min_ndim: leave alone tensors of fewer dimensions; those of size 1 do not count. None: 2.
        input_dims: by pattern, the dimensions that an output sums over: the one that N:M goes
            along, and the last ones, if they are the kernel of a convolution. The first pattern
            that matches counts. Needed for tensors whose layout cannot be derived. A mapping, or
            pairs; stored as pairs.
        nan: "error": a NaN in a selected tensor is an error; "keep": it is kept.
        masks: whether to write the masks.
        min_sparsity, max_sparsity: limits of every single tensor, in [0, 1], for the scope
            "global"; floors are rounded up to a count, and ceilings down. The total stays exact.
        groups: instead of a sparsity and a selection, budgets for parts of a checkpoint: requests
            whose tensors are ranked separately. A tensor in no group is left alone, and none is
            in two. ``seed``, ``nan``, ``masks``, ``card``, ``statistics`` and ``scores``
            are those of the whole.
        card: whether README.md of the result describes the pruning, above the text of the
            source's README.md; false copies that of the source.
        normalize: what the scores of each tensor are divided by before they are ranked together
            with those of others: "rms", "l2" or "mean" (of the magnitudes); None: nothing. The
            command line and recipe files have "rms" as their default, but for scores of gradients.
        statistics: path of the statistics of activations that "wanda", "stade", "ria" and the
            budget "owl" need, as ``ActivationStatistics.save`` writes them; or of those of
            gradients, for "fisher", as ``GradientStatistics.save`` does.
        scores: path of the scores for "given", "taylor" and "elementwise_fisher": a folder of
            safetensors files, or one file, with a tensor for each pruned one, of its name and
            shape.
        schedule: instead of a sparsity, its course over the steps of training; for models.
        budget: how the pruned elements are divided among the tensors, with the scope "global":
            "uniform", "erk", or, for checkpoints, "owl"; see :mod:`distprune.budgets`.
            None: as one ranking of all tensors has it.
        names: the parameters of a module, as for ``select``; for models. None: any.

    Raises:
        RecipeError: with every field that is wrong.
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
    min_ndim: int | None = None
    input_dims: Any = ()
    nan: Literal["error", "keep"] = "error"
    masks: bool = True
    min_sparsity: float = 0.0
    max_sparsity: float = 1.0
    groups: tuple[Request, ...] = ()
    card: bool = True
    normalize: Normalization | None = None
    statistics: str | None = None
    scores: str | None = None
    schedule: Schedule | None = None
    budget: Budget | None = None
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check what a caller gave, and take it with the types that are declared above."""
        own = vars(self)
        problems = self._take_groups()
        for name in ("statistics", "scores"):
            if isinstance(own[name], os.PathLike):
                own[name] = os.fspath(own[name])
        if not problems:
            try:
                form = _check(self.as_mapping(), Problems(), "the recipe")
            except RecipeError as error:
                problems = list(error.problems)
            else:
                own.update(vars(self._made(_values_of(form), "the recipe")))
        if problems:
            raise RecipeError("the recipe", problems)

    @classmethod
    def parse(cls, mapping: Mapping[str, Any]) -> Self:
        """A request from plain values, as YAML or JSON would have them.

        Raises:
            RecipeError: with every problem, what was found and what was expected.
            ImportError: pydantic is missing.
        """
        return cls._read(mapping, Problems(), "the recipe")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A request from a YAML file, or from a shipped recipe by its name.

        Raises:
            RecipeError: with every problem, what was found and what was expected.
            FileNotFoundError: there is no such file.
            ImportError: PyYAML or pydantic is missing.
        """
        file = Path(path)
        if not file.exists():
            file = shipped_recipes().get(str(path), file)
        _need_pydantic()
        document, problems = read_yaml(file)
        request = cls._read(document, problems, str(path))
        inputs = {name: getattr(request, name) for name in ("statistics", "scores")}
        return request.replaced(
            **{name: str(file.parent / value) for name, value in inputs.items() if value}
        )

    @classmethod
    def _read(cls, document: object, problems: Problems, where: str) -> Self:
        values = _values_of(_check(document, problems, where))
        if len(values["groups"]) == 1:
            values |= {**values["groups"][0], "groups": ()}
        return cls._made(values, where)

    @classmethod
    def _made(cls, values: dict[str, Any], where: str) -> Self:
        """A request of checked values; its groups are still mappings. ``where`` is for messages."""
        groups = tuple(cls._unchecked(group) for group in values["groups"])
        return cls._unchecked({**values, "groups": groups})

    @classmethod
    def _unchecked(cls, values: Mapping[str, Any]) -> Self:
        request = object.__new__(cls)
        vars(request).update({field.name: field.default for field in fields(cls)} | dict(values))
        return request

    def replaced(self, **changes: Any) -> Self:
        """This request with other values, which are right: nothing is checked again."""
        return self._unchecked(vars(self) | changes)

    @property
    def parts(self) -> tuple[Self, ...]:
        """The groups; this request itself if it has none."""
        return cast("tuple[Self, ...]", self.groups) or (self,)

    @property
    def is_global(self) -> bool:
        """Whether all tensors are ranked together, not each of them or each row on its own."""
        return self.scope == "global" and self.pattern is None

    @property
    def is_normalizable(self) -> bool:
        """Whether the order of the weights depends on what each tensor is divided by."""
        return is_normalizable(self.scope, self.pattern, self.budget, self.score)

    @property
    def ranks_magnitudes(self) -> bool:
        """Whether the score of an element is its magnitude."""
        return self.score == "magnitude"

    @property
    def needs_statistics(self) -> bool:
        """Whether scores are made of weights and of statistics."""
        return self.score in FROM_STATISTICS

    @property
    def reads_statistics(self) -> bool:
        """Whether scores or the budget are made of statistics."""
        return self.needs_statistics or self.budget == BUDGET_FROM_STATISTICS

    @property
    def reads_gradients(self) -> bool:
        """Whether scores are made of gradients."""
        return self.score in FROM_GRADIENTS

    @property
    def ranks_raw(self) -> bool:
        """Whether tensors are ranked together by numbers of weights that are not normalised."""
        return self.is_normalizable and self.normalize is None and not self.reads_gradients

    @property
    def reads_scores(self) -> bool:
        """Whether files hold a score for each weight."""
        return self.score in FROM_FILES

    @property
    def has_limits(self) -> bool:
        """Whether single tensors have a floor or a ceiling."""
        return (self.min_sparsity, self.max_sparsity) != (0.0, 1.0)

    @property
    def kept_of(self) -> tuple[int, int] | None:
        """(N, M) of the pattern."""
        return None if self.pattern is None else parse_pattern(self.pattern)

    @property
    def group_rule(self) -> BlockRule:
        """Which groups of elements are ranked on their own, and how many each of them loses."""
        return BlockRule(self.scope, self.sparsity, self.kept_of)

    @property
    def needs_input_dim(self) -> bool:
        """Whether it matters along which dimension the inputs of a tensor lie."""
        return self.group_rule.needs_input_dim

    @property
    def course(self) -> Schedule:
        """The sparsity at each step: the schedule, or all of it at step 0."""
        if self.schedule is not None:
            return self.schedule
        if self.kept_of is not None:
            n, m = self.kept_of
            return OneShot(0, 1 - n / m)
        return OneShot(0, self.sparsity or 0.0)

    def as_mapping(self) -> dict[str, Any]:
        """The keys of a recipe file, every default filled in; :meth:`parse` reads them again.

        A recipe that ranks raw magnitudes is one of version 1, whose default that was: so the files
        of results that were made before there was another version are still what is written here.
        Values that are not checked yet may be wrong, and are written as they are.
        """
        is_raw = all(part.normalize is None for part in self.parts)
        values: dict[str, Any] = {"version": 1 if is_raw else 2}
        for name in _WHOLE:
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        if self.groups:
            values["groups"] = [group._part_as_mapping(is_raw) for group in self.groups]
        else:
            values |= self._part_as_mapping(is_raw)
        return values | {"nan": self.nan, "output": {"masks": self.masks, "card": self.card}}

    def _part_as_mapping(self, is_raw: bool) -> dict[str, Any]:
        values: dict[str, Any] = {"score": self.score}
        if self.pattern is not None:
            values["pattern"] = self.pattern
        if self.pattern is None or self.scope != "global":
            values["scope"] = self.scope
        if self.normalize is not None or (not is_raw and self.is_normalizable):
            values["normalize"] = self.normalize or "none"
        if self.sparsity is not None:
            values["sparsity"] = self.sparsity
        if isinstance(self.schedule, Schedule):
            values["schedule"] = schedule_fields(self.schedule)
        elif self.schedule is not None:
            values["schedule"] = self.schedule
        if self.budget is not None:
            values["budget"] = self.budget
        values["select"] = self._select_as_mapping()
        if self.has_limits:
            limits = {"min_sparsity": self.min_sparsity, "max_sparsity": self.max_sparsity}
            values["limits"] = limits
        return values

    def _select_as_mapping(self) -> dict[str, Any]:
        """The section ``select``, without the keys that are left out by default."""
        values: dict[str, Any] = {}
        if self.min_ndim is not None or type(self).min_ndim is not None:
            values["min_ndim"] = self.min_ndim
        for name, default in (("include", None), ("also", ()), ("exclude", ())):
            value = getattr(self, name)
            if value != default and not (value == [] and default == ()):
                values[name] = _listed(value)
        if self.input_dims not in ((), [], {}):
            try:
                pairs = dict(self.input_dims)
            except (TypeError, ValueError):
                values["input_dims"] = self.input_dims
            else:
                values["input_dims"] = {pattern: _listed(dims) for pattern, dims in pairs.items()}
        if self.names is not None:
            values["names"] = _listed(self.names)
        return values

    def _take_groups(self) -> list[str]:
        """Take groups that are mappings, as they stand in JSON; return what is wrong."""
        own, items = vars(self), cast("object", self.groups)
        own["groups"] = ()
        if not items:
            return []
        if isinstance(items, str | Request) or not isinstance(items, Sequence):
            return [f"groups is {items!r}; expected a list of recipes."]
        problems = [
            f"{field.name} is given beside groups; expected it in each of the groups."
            for field in fields(self)
            if field.name not in _SHARED
            # JSON has no tuples.
            and (tuple(own[field.name]) if isinstance(own[field.name], list) else own[field.name])
            != field.default
        ]
        groups = []
        for number, item in enumerate(items):
            try:
                group = item if isinstance(item, Request) else Request(**item)
            except RecipeError as error:
                problems += [f"groups[{number}]: {problem}" for problem in error.problems]
                continue
            except TypeError as error:
                problems.append(f"groups[{number}] is {item!r}; expected a recipe ({error}).")
                continue
            problems += [f"groups[{number}]: {text}" for text in self._not_shared(group)]
            groups.append(group)
        own["groups"] = tuple(groups)
        return problems

    def _not_shared(self, group: Request) -> list[str]:
        """The fields of a group that only the request as a whole may have."""
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


def shipped_recipes() -> dict[str, Path]:
    """The files of the recipes that come with distprune by name, in order."""
    folder = Path(str(resources.files("distprune.recipes") / "shipped"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def recipe_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, as plain values.

    Raises:
        ImportError: pydantic is missing.
    """
    _need_pydantic()
    from distprune.recipes import form

    return form.recipe_schema()


def _check(document: object, problems: Problems, where: str) -> RecipeForm:
    """Check a document, or raise RecipeError with every problem."""
    _need_pydantic()
    from distprune.recipes import form

    return form.check(document, problems, where)


def _need_pydantic() -> None:
    try:
        import pydantic  # noqa: F401
    except ImportError as error:
        raise ImportError("recipes need pydantic: pip install 'distprune[recipes]'") from error


def _values_of(form: RecipeForm) -> dict[str, Any]:
    """The fields of a request that a checked document describes; groups are mappings."""
    shared = {"nan": form.nan, "masks": form.output.masks, "card": form.output.card}
    parts = [_part_of(group) for group in form.resolved()]
    for part in parts:
        part |= shared | {"seed": form.seed if part["score"] == "random" else None}
    whole = {name: getattr(form, name) for name in _WHOLE}
    if form.groups:
        return {**shared, **whole, "groups": parts}
    return {**parts[0], **whole, "groups": []}


def _part_of(group: GroupForm) -> dict[str, Any]:
    select, limits = group.select, group.limits
    schedule = None if group.schedule is None else group.schedule.as_schedule()
    sparsity = group.sparsity
    if isinstance(schedule, OneShot) and schedule.step == 0:
        sparsity, schedule = schedule.sparsity, None
    return {
        **{name: getattr(select, name) for name in type(select).model_fields},
        "sparsity": sparsity,
        "schedule": schedule,
        "scope": group.scope or "global",
        "budget": group.budget,
        "pattern": group.pattern,
        "score": group.ranked_by or "magnitude",
        "normalize": None if group.normalize == "none" else group.normalize,
        "min_sparsity": 0.0 if limits is None else limits.min_sparsity,
        "max_sparsity": 1.0 if limits is None else limits.max_sparsity,
    }


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
