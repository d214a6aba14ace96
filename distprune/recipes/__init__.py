"""Recipes: what to prune, how much and when, as one value that is checked when it is made.

    recipe = Recipe(sparsity=0.5, scope="layer")  # or load_recipe("cubic_80"), or a YAML file
    pruner = ScheduledPruner.from_recipe(model, recipe)  # the model may be wrapped

A file has the same keys, all of which but ``sparsity``, ``schedule`` or ``pattern`` may be left
out; the options of ``distprune prune`` have them, too::

    score: magnitude           # what ranks weights
    scope: global              # one ranking over all selected parameters; layer: one for each of
                               # them; row: one for each output row
    normalize: rms             # what divides the scores of each parameter before they are ranked
    budget: erk                # divide the total among parameters by a rule, not by one ranking
    pattern: "2:4"             # instead of a sparsity: 2 of every 4 in a row are kept
    schedule:                  # or, at once: sparsity: 0.8
      kind: cubic              # linear; one_shot, which has step and sparsity
      begin: 0
      end: 1000
      frequency: 100
      initial_sparsity: 0.0
      final_sparsity: 0.8
    also: ["lm_head"]          # besides the default, which include would replace
    exclude: ["*.layers.0.*"]
    max_sparsity: 0.95         # of every single parameter

Making a recipe needs pydantic, and reading one from a file PyYAML: ``pip install
'distprune[recipes]'``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from distprune.base.blocks import BlockRule, Scope, parse_pattern
from distprune.base.schedules import SCHEDULES, OneShot, Schedule, schedule_fields
from distprune.base.selecting import matcher

__all__ = ["GroupRecipe", "Recipe", "load_recipe", "shipped_recipes"]

if TYPE_CHECKING:
    from typing_extensions import Self

    from distprune.base.exact_sums import Normalization  # torch comes with it

# Scores that are made of weights and of statistics of activations; fisher needs those of gradients.
FROM_ACTIVATIONS = ("wanda", "stade", "ria")
FROM_STATISTICS = (*FROM_ACTIVATIONS, "fisher")
# Scores of which files hold one for each weight; all but the last are made of gradients.
ELEMENTWISE = ("taylor", "elementwise_fisher")
FROM_FILES = (*ELEMENTWISE, "given")
FROM_GRADIENTS = ("fisher", *ELEMENTWISE)
# What the paths of inputs become in the recipe of a result, beside which the statistics lie.
STORED_STATISTICS = "statistics.safetensors"
STORED_SCORES = "scores"
_MAX_BYTES = 1_000_000  # of a file: more than any recipe needs


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _pattern(value: Any) -> str:
    try:
        n, m = parse_pattern(value)
    except ValueError as error:
        # Without quotes, YAML may read it as a number to the base of 60.
        raise ValueError(f"{error}; YAML needs quotes around it") from None
    return f"{n}:{m}"


def _schedule(value: Any) -> Schedule:
    if isinstance(value, tuple(SCHEDULES.values())):
        return cast("Schedule", value)
    if not isinstance(value, Mapping) or str(value.get("kind")) not in SCHEDULES:
        raise ValueError(f"expected a mapping with the key 'kind', one of {', '.join(SCHEDULES)}")
    fields = dict(value)
    try:
        return SCHEDULES[fields.pop("kind")](**fields)
    except TypeError as error:
        raise ValueError(str(error)) from error


Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1)]
_Glob = Annotated[_Name, AfterValidator(lambda pattern: matcher(pattern) and pattern)]
_OneOrMore = BeforeValidator(_listed, json_schema_input_type=str | list[str])
Names = Annotated[tuple[_Name, ...], Field(strict=False), _OneOrMore]
Patterns = Annotated[tuple[_Glob, ...], Field(strict=False), _OneOrMore]
Dims = Annotated[
    tuple[int, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_listed, json_schema_input_type=int | list[int]),
]
PathText = Annotated[_Name, BeforeValidator(_path, json_schema_input_type=str)]
Steps = Annotated[
    Schedule,
    PlainValidator(_schedule, json_schema_input_type=dict[str, Any]),
    PlainSerializer(schedule_fields),
]


class GroupRecipe(BaseModel):
    """Some parameters of a model, what ranks their weights, and how many of these are pruned.

    The descriptions of the fields are the help of the command line, too.

    Attributes:
        sparsity: the share of elements to prune, in [0, 1]: of all selected tensors together, of
            each tensor, or of each row, as ``scope`` says; rounded to a count, halves to even.
        pattern: instead of a sparsity, "N:M": of every M neighbours along the inputs, N are kept.
        schedule: instead of a sparsity, its course over the steps of training; for models. In a
            file: ``kind`` ("cubic", "linear" or "one_shot"), and the arguments of that schedule.
        scope: what is ranked together: "global" all selected tensors, "layer" each tensor, "row"
            each output row.
        score: "magnitude"; "random": the numbers that ``RandomUnstructured`` would draw. For
            checkpoints also "wanda": |w| times the rms of its input; "stade": |w| times the
            standard deviation of its input; "ria": the relative importance of |w| times the rms
            of its input; "fisher": the root of the Fisher information by factors; "given": |score|
            of ``scores``; "taylor", |w| times the mean |gradient|, and "elementwise_fisher", w**2
            times the mean squared gradient: of ``scores``, which ``prune --text`` makes.
        budget: how the pruned elements are divided among the tensors, with the scope "global":
            "uniform", "erk", or, for checkpoints, "owl"; see :mod:`distprune.budgets`. None: as
            one ranking of all tensors has it.
        normalize: what the scores of each tensor are divided by before they are ranked together
            with those of others: "rms", "l2", "mean" (of the magnitudes), or "none". None: "rms",
            but "none" for scores of gradients.
        min_sparsity, max_sparsity: limits of every single tensor, in [0, 1], for the scope
            "global"; floors are rounded up to a count, and ceilings down. The total stays exact.
        include: globs, or regular expressions after ``re:``, for names. None: matrices, except
            embeddings, heads, norms, routers, biases and scales.
        also: patterns of tensors to prune in addition to the default of ``include``.
        exclude: patterns of tensors to leave alone, whatever selects them.
        min_ndim: leave alone tensors of fewer dimensions; those of size 1 do not count.
        input_dims: by pattern, the dimensions that an output sums over: the one that N:M goes
            along, and the last ones, if they are the kernel of a convolution. The first pattern
            that matches counts. Needed for tensors whose layout cannot be derived.
        names: the parameters of a module, as for ``select``; for models. None: any.

    Raises:
        pydantic.ValidationError: which is a ValueError; with every field that is wrong, or every
            pair that contradict each other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sparsity: Share | None = Field(
        None, description="Share to prune, 0 to 1; it becomes an exact count."
    )
    pattern: Annotated[str, BeforeValidator(_pattern, json_schema_input_type=str)] | None = Field(
        None, description="Keep N of every M neighbours along the inputs: 2:4."
    )
    schedule: Steps | None = Field(
        None, description="The sparsity over the steps of training; models only."
    )
    scope: Scope = Field(
        "global", description="What is ranked together: all, each tensor, or each output row."
    )
    score: Literal[
        "magnitude", "random", "wanda", "stade", "ria", "fisher", "taylor", "elementwise_fisher",
        "given",
    ] = Field(
        "magnitude",
        description="What ranks weights: magnitude, random, wanda, stade, ria, fisher, taylor, "
        "elementwise_fisher, or given (by scores).",
    )  # fmt: skip
    budget: Literal["uniform", "erk", "owl"] | None = Field(
        None, description="Rule that divides the pruned weights among the tensors."
    )
    normalize: Literal["rms", "l2", "mean", "none"] | None = Field(
        None, description="What divides the scores of a tensor before all are ranked."
    )
    min_sparsity: Share = Field(0.0, description="Least sparsity of every single tensor (0).")
    max_sparsity: Share = Field(1.0, description="Largest sparsity of every single tensor (1).")
    include: Patterns | None = Field(
        None, description="Globs, or expressions after re:, of names to prune."
    )
    also: Patterns = Field(
        (), description="Patterns of names to prune besides the default of include."
    )
    exclude: Patterns = Field((), description="Patterns of names to leave alone.")
    min_ndim: Annotated[int, Field(ge=1)] = Field(
        2, description="Leave alone tensors of fewer dimensions larger than 1 (2)."
    )
    input_dims: dict[_Glob, Dims] = Field(
        default_factory=dict,
        description="PATTERN=DIM: the dimension of the inputs, as *.c_fc.weight=0.",
    )
    names: Names | None = Field(
        None, description="Names that modules have for the parameters; models only."
    )

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if problems := list(self._contradictions()):
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Keys that exclude each other, with the values of both."""
        amounts = {key: getattr(self, key) for key in ("sparsity", "pattern", "schedule")}
        given = [f"{key} {value!r}" for key, value in amounts.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            yield f"expected one of sparsity, pattern and schedule, found {found}"
        if self.also and self.include is not None:
            yield "also adds to the default, which include replaces; leave one of them out"
        if self.min_sparsity > self.max_sparsity:
            yield f"min_sparsity {self.min_sparsity} is above max_sparsity {self.max_sparsity}"
        alone = f"scope {self.scope!r}" if self.scope != "global" else ""
        if self.pattern is not None:
            if alone:
                yield f"{alone} has no place beside pattern {self.pattern!r}; leave one out"
            alone = f"pattern {self.pattern!r}"
        if alone:
            for key, default in (("budget", None), ("min_sparsity", 0.0), ("max_sparsity", 1.0)):
                if (value := getattr(self, key)) != default:
                    yield f"{key} {value!r} has no effect with {alone}; leave one of them out"
        if self.normalize not in (None, "none") and not self.is_normalizable:
            reason = alone or (f"budget {self.budget!r}" if self.budget else "score 'random'")
            yield f"normalize {self.normalize!r} has no effect with {reason}; leave one of them out"

    @property
    def is_global(self) -> bool:
        """Whether all tensors are ranked together, not each of them or each row on its own."""
        return self.scope == "global" and self.pattern is None

    @property
    def is_normalizable(self) -> bool:
        """Whether the order of the weights depends on what each tensor is divided by."""
        return self.is_global and self.budget is None and self.score != "random"

    @property
    def divisor(self) -> Normalization | None:
        """What the scores of each tensor are divided by; None: by nothing."""
        if not self.is_normalizable or self.normalize == "none":
            return None
        return self.normalize or (None if self.reads_gradients else "rms")

    @property
    def needs_statistics(self) -> bool:
        """Whether scores are made of weights and of statistics."""
        return self.score in FROM_STATISTICS

    @property
    def reads_statistics(self) -> bool:
        """Whether scores or the budget are made of statistics."""
        return self.needs_statistics or self.budget == "owl"

    @property
    def reads_gradients(self) -> bool:
        """Whether scores are made of gradients."""
        return self.score in FROM_GRADIENTS

    @property
    def reads_scores(self) -> bool:
        """Whether files hold a score for each weight."""
        return self.score in FROM_FILES

    @property
    def has_limits(self) -> bool:
        """Whether single tensors have a floor or a ceiling."""
        return (self.min_sparsity, self.max_sparsity) != (0.0, 1.0)

    @property
    def group_rule(self) -> BlockRule:
        """Which groups of elements are ranked on their own, and how many each of them loses."""
        kept_of = None if self.pattern is None else parse_pattern(self.pattern)
        return BlockRule(self.scope, self.sparsity, kept_of)

    @property
    def course(self) -> Schedule:
        """The sparsity at each step: the schedule, or all of it at step 0."""
        return self.schedule or OneShot(0, self.group_rule.wanted)

    def by_divisor(self, words: str) -> str:
        """Some words, and what the scores of a tensor are divided by; "" if they are not."""
        if self.divisor is None:
            return ""
        mean = "mean magnitude" if self.score == "magnitude" else "mean score"
        divisor = {"rms": "rms", "l2": "l2 norm", "mean": mean}[self.divisor]
        return f" {words} {divisor} of its tensor"

    @property
    def score_text(self) -> str:
        """What ranks the weights, in words."""
        score = "given scores" if self.score == "given" else self.score
        return score + self.by_divisor("/")


class Recipe(GroupRecipe):
    """What to prune, how much and when; or groups of parameters that are ranked separately.

    Attributes:
        groups: instead of the keys of :class:`GroupRecipe`, parts of a checkpoint with sparsities
            of their own. A tensor in no group is left alone, and none may be in two.
        seed: of random scores. None: 0.
        statistics: path of the statistics of activations that "wanda", "stade", "ria" and the
            budget "owl" need, as ``ActivationStatistics.save`` writes them; or of those of
            gradients, for "fisher", as ``GradientStatistics.save`` does.
        scores: path of the scores for "given", "taylor" and "elementwise_fisher": a folder of
            safetensors files, or one file, with a tensor for each pruned one, of its name and
            shape.
        card: whether README.md of the result describes the pruning, above the text of the
            source's README.md; false copies that of the source.
    """

    model_config = ConfigDict(title="A recipe of distprune")

    groups: Annotated[tuple[GroupRecipe, ...], Field(strict=False, max_length=128)] = Field(
        (),
        description="Parts of a checkpoint that are ranked separately, each with a sparsity and "
        "patterns of its own. A tensor in no group is left alone, and none may be in two.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        None, description="Seed of the score random (0)."
    )
    statistics: PathText | None = Field(
        None, description="File that `distprune calibrate` writes; for fisher with --gradients."
    )
    scores: PathText | None = Field(
        None, description="Folder or file of a tensor of scores for each pruned one."
    )
    card: bool = Field(True, description="Describe the pruning in README.md.")

    def _contradictions(self) -> Iterator[str]:
        if self.groups:
            if beside := sorted(self.model_fields_set & GroupRecipe.model_fields.keys()):
                yield f"groups stand beside {', '.join(beside)}; expected these in each group"
        else:
            yield from super()._contradictions()
        scores = {part.score for part in self.parts}
        if self.seed is not None and "random" not in scores:
            yield f"seed {self.seed} has no effect without score 'random'"
        if self.statistics is not None and not any(part.reads_statistics for part in self.parts):
            yield (
                f"statistics {self.statistics!r} have no effect without score "
                f"{', '.join(FROM_STATISTICS)}, or budget owl"
            )
        if self.scores is not None and scores.isdisjoint(FROM_FILES):
            yield f"scores {self.scores!r} have no effect without score {', '.join(FROM_FILES)}"

    @property
    def parts(self) -> tuple[GroupRecipe, ...]:
        """The groups; this recipe itself if it has none."""
        return self.groups or (self,)

    def as_stored(self) -> Recipe:
        """The recipe as it stands in a result: beside its statistics, and without other paths."""
        stored = {"statistics": STORED_STATISTICS, "scores": STORED_SCORES}
        return self.model_copy(
            update={key: path for key, path in stored.items() if getattr(self, key) is not None}
        )

    def as_values(self) -> dict[str, Any]:
        """The keys of a recipe file with plain values, every default filled in."""
        unused = set(GroupRecipe.model_fields) if self.groups else {"groups"}
        values = self.model_dump(mode="json", exclude=unused)
        for part, keys in zip(self.parts, values.get("groups", [values]), strict=True):
            if part.is_normalizable:
                keys["normalize"] = part.divisor or "none"
            for key in [key for key, value in keys.items() if value is None]:
                del keys[key]
        return {key: value for key, value in values.items() if value is not None}

    def to_yaml(self) -> str:
        """A recipe file with every default filled in, which ``load_recipe`` reads."""
        return yaml.safe_dump(self.as_values(), sort_keys=False)


def load_recipe(path: str | Path) -> Recipe:
    """A recipe from a YAML file.

    Args:
        path: of the file, or the name of a recipe that comes with distprune, such as "cubic_80".
            Relative paths in the recipe start at its folder.

    Raises:
        ValueError: there is no such file, or it is no recipe; names every key that is wrong.
        OSError: the file cannot be read.
    """
    return make_recipe(read_keys(path), str(path))


def make_recipe(keys: dict[str, Any], name: str) -> Recipe:
    """A recipe from the keys of a file.

    Args:
        keys: with their values.
        name: of the recipe, for the message of an error.

    Raises:
        ValueError: with every key that is wrong.
    """
    try:
        return Recipe(**keys)
    except ValidationError as error:
        raise ValueError(
            "\n  - ".join([f"the recipe {name} is wrong:", *problems_of(error)])
        ) from error


def problems_of(error: ValidationError, label: Callable[[str], str] = str) -> list[str]:
    """A sentence for each value that is wrong; ``label`` turns its key into how it is called."""
    problems = []
    for each in error.errors(include_url=False):
        text = each["msg"].removeprefix("Value error, ")
        if each["loc"]:
            key, *rest = map(str, each["loc"])
            text = f"{'.'.join([label(key), *rest])}: {text}, found {str(each['input'])[:60]!r}"
        problems.append(f"{text}.")
    return problems


def read_keys(path: str | Path) -> dict[str, Any]:
    """The keys of a YAML file, or of a shipped recipe, with their values unchecked.

    Raises:
        ValueError: there is no such file, or it is no YAML, or no mapping; names the file.
        OSError: the file cannot be read.
    """
    file = Path(path)
    if not file.exists():
        shipped = shipped_recipes()
        if str(path) not in shipped:
            raise ValueError(
                f"{path} is neither a file nor a shipped recipe; expected a YAML file, or one of "
                f"{', '.join(shipped)}."
            )
        file = shipped[str(path)]
    with file.open("rb") as stream:  # it may be the wrong file, such as one of weights
        text = stream.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES:,} bytes; expected a recipe.")
    try:
        keys = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{path} is no recipe; expected keys with values, such as sparsity: 0.5.")
    for name in ("statistics", "scores"):
        if isinstance(keys.get(name), str):
            keys[name] = str(file.parent / keys[name])
    return keys


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, and aliases: a few of them can expand to any size."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not read; a pattern that begins with * needs quotes",
                problem_mark=self.get_mark(),
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        values = super().construct_mapping(node, deep)
        if len(values) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key is given twice", problem_mark=node.start_mark)
        return values


def shipped_recipes() -> dict[str, Path]:
    """The files of the recipes that come with distprune by name, in order."""
    folder = Path(str(resources.files("distprune.recipes") / "shipped"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
