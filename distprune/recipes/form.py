"""The keys of a recipe and the values that each may have: the only model of a recipe.

A recipe is a mapping, usually from a YAML file. :class:`RecipeForm` is the whole of it and
:class:`GroupForm` an item of ``groups``. The JSON schema is made from these classes. Rules about
keys that exclude each other stand below: they are checked even if values are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from distprune import recipes
from distprune.base import blocks
from distprune.base.blocks import parse_pattern
from distprune.base.schedules import SCHEDULES, Schedule
from distprune.base.selecting import check_pattern
from distprune.recipes import KeyPath, Problems, RecipeError


def listed(values: Sequence[object]) -> str:
    """ "'a', 'b' or 'c'"."""
    *rest, last = map(repr, values)
    return f"{', '.join(rest)} or {last}" if rest else last


def compile_pattern(pattern: str) -> None:
    """Check a regular expression after "re:"; globs are always right.

    Raises:
        ValueError: with what was expected.
    """
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"expected a regular expression after 're:' ({error})") from error


def input_dims_pairs(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dimensions by pattern, {"*.c_fc.weight": 0}, as pairs; a dimension alone or a list of them.

    Raises:
        ValueError: with what was expected.
    """
    expected = "expected dimensions by pattern, such as {'*.c_fc.weight': 0}"
    try:
        dims_of = dict(value)  # also of pairs
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    pairs = []
    for pattern, dims in dims_of.items():
        dims = dims if isinstance(dims, list | tuple) else [dims]
        if not isinstance(pattern, str) or not pattern or not dims or not all(map(_is_int, dims)):
            raise ValueError(expected)
        compile_pattern(pattern)
        pairs.append((pattern, tuple(dims)))
    return tuple(pairs)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _pattern_of_zeros(value: Any) -> str:
    try:
        n, m = parse_pattern(value)
    except ValueError:
        # Without quotes, YAML may read it as a number to the base of 60.
        raise ValueError("expected a pattern N:M such as '2:4', in quotes") from None
    return f"{n}:{m}"


def _texts(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values:
        raise ValueError("expected a string or a list of strings")
    if not all(isinstance(text, str) and text for text in values):
        raise ValueError("expected strings that are not empty")
    return tuple(values)


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = _texts(value)
    for pattern in patterns:
        compile_pattern(pattern)
    return patterns


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("expected the path of a file or a folder")
    return value


_Text = Annotated[str, Field(min_length=1)]
_TextOrTexts = _Text | Annotated[list[_Text], Field(min_length=1)]
_Dims = int | Annotated[list[int], Field(min_length=1)]
_PatternText = Annotated[str, Field(pattern="^[0-9]{1,4}:[0-9]{1,4}$")]

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Step = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_texts, json_schema_input_type=_TextOrTexts)]
Patterns = Annotated[
    tuple[str, ...], BeforeValidator(_patterns, json_schema_input_type=_TextOrTexts)
]
PathText = Annotated[str, BeforeValidator(_path, json_schema_input_type=_Text)]
PatternOfZeros = Annotated[
    str, BeforeValidator(_pattern_of_zeros, json_schema_input_type=_PatternText)
]
InputDims = Annotated[
    tuple[tuple[str, tuple[int, ...]], ...],
    BeforeValidator(input_dims_pairs, json_schema_input_type=dict[str, _Dims]),
]


class Section(BaseModel):
    """A mapping of a recipe. Unknown keys are errors; so is None, see :func:`check`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SelectForm(Section):
    """The parameters that are pruned. Patterns are globs, or regular expressions after 're:'."""

    include: Patterns | None = Field(
        default=None,
        description="Patterns of names. Checkpoints: of whole tensor names.",
    )
    also: Patterns = Field(default=(), description="Patterns besides the default.")
    exclude: Patterns = Field(default=(), description="Patterns of names that are left alone.")
    names: Texts | None = Field(
        default=None, description="Names that modules have for the parameters; models only."
    )
    min_ndim: Positive | None = Field(
        default=None,
        description="Fewest dimensions larger than 1.",
    )
    input_dims: InputDims = Field(
        default=(), description="The dimension of the inputs, by pattern; checkpoints only."
    )

    @model_validator(mode="after")
    def _adds_to_the_default(self) -> SelectForm:
        if self.also and self.include is not None:
            raise ValueError("'also' adds to the default, which 'include' replaces; leave one out")
        return self


class LimitsForm(Section):
    """Limits of the sparsity of every single parameter, for the scope global."""

    min_sparsity: Share = 0.0
    max_sparsity: Share = 1.0

    @model_validator(mode="after")
    def _floor_below_ceiling(self) -> LimitsForm:
        if self.min_sparsity > self.max_sparsity:
            raise ValueError(
                f"min_sparsity {self.min_sparsity} is above max_sparsity {self.max_sparsity}"
            )
        return self

    @property
    def has_effect(self) -> bool:
        return (self.min_sparsity, self.max_sparsity) != (0.0, 1.0)


class OutputForm(Section):
    """What is written beside a pruned checkpoint."""

    masks: bool = Field(default=True, description="The masks.")
    card: bool = Field(default=True, description="A README.md that says what was done.")


class ScheduleForm(Section):
    """The sparsity at each step."""

    @model_validator(mode="after")
    def _goes_together(self) -> ScheduleForm:
        self.as_schedule()
        return self

    def as_schedule(self) -> Schedule:
        """The schedule that is described."""
        values = self.model_dump()
        return SCHEDULES[values.pop("kind")](**values)


class OneShotForm(ScheduleForm):
    """Prune once."""

    kind: Literal["one_shot"]
    step: Step = 0
    sparsity: Share


class RampForm(ScheduleForm):
    """Raise the sparsity from one step to another."""

    kind: Literal["linear", "cubic"]
    begin: Step = 0
    end: Step
    frequency: Positive
    initial_sparsity: Share = 0.0
    final_sparsity: Share


class BudgetForm(Section):
    """What ranks the weights, what is ranked together, and how many are pruned."""

    score: recipes.Score | None = Field(
        default=None,
        description="What ranks weights. wanda, stade, ria and fisher need statistics; taylor, "
        "elementwise_fisher and given need scores, and prune --text makes those of the first two. "
        "All these are for checkpoints only. Default: magnitude.",
    )
    method: recipes.Score | None = Field(default=None, description="The same as score.")
    scope: blocks.Scope | None = Field(
        default=None,
        description="What is ranked together: everything, each tensor, or each output row. "
        "Default: global.",
    )
    normalize: Literal["rms", "l2", "mean", "none"] | None = Field(
        default=None,
        description="What magnitudes are divided by before all tensors are ranked together: the "
        "rms, the l2 norm or the mean magnitude of their tensor, or nothing. Default: rms; for "
        "scores fisher, taylor and elementwise_fisher, and in recipes of version 1: none.",
    )
    budget: recipes.Budget | None = Field(
        default=None,
        description="How the pruned weights are divided among the tensors, with the scope global: "
        "one of the rules of distprune.budgets. owl needs statistics, and is for checkpoints only. "
        "Default: one ranking of all tensors.",
    )
    pattern: PatternOfZeros | None = Field(
        default=None,
        description="N:M instead of a sparsity: N of every M in a row are kept.",
    )
    sparsity: Share | None = Field(
        default=None, description="The share of the selected weights to prune, at once."
    )
    schedule: Annotated[OneShotForm | RampForm, Field(discriminator="kind")] | None = Field(
        default=None, description="Instead of a sparsity: its course over training. Models only."
    )
    limits: LimitsForm | None = Field(
        default=None,
        description="Of every single parameter; the total stays exact.",
    )

    @property
    def ranked_by(self) -> recipes.Score | None:
        """The score, by either of its keys."""
        return self.score or self.method

    @property
    def has_amount(self) -> bool:
        return any(each is not None for each in (self.sparsity, self.schedule, self.pattern))

    @property
    def is_normalizable(self) -> bool:
        """Whether the order of the weights depends on what each tensor is divided by."""
        return recipes.is_normalizable(self.scope, self.pattern, self.budget, self.ranked_by)


class GroupForm(BudgetForm):
    """A part of a model with a budget of its own; it has what differs from the top level."""

    select: SelectForm = Field(description="The parameters of this group.")


class _HeadForm(Section):
    version: Literal[1, 2] = Field(description="Of this format.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None, description="Of the score random."
    )


class RecipeForm(BudgetForm, _HeadForm):
    """What to prune, how much, and when."""

    model_config = ConfigDict(title="A recipe of distprune")

    nan: Literal["error", "keep"] = Field(
        default="error", description="Whether a NaN among the weights of a checkpoint is an error."
    )
    statistics: PathText | None = Field(
        default=None,
        description="The file of activation statistics, for scores wanda, stade and ria, and for "
        "budget owl; or of gradient statistics, for score fisher. Relative paths start at the "
        "recipe. Checkpoints only.",
    )
    scores: PathText | None = Field(
        default=None,
        description="The folder or safetensors file of scores, for scores given, taylor and "
        "elementwise_fisher. Relative paths start at the recipe. Checkpoints only.",
    )
    output: OutputForm = Field(default_factory=OutputForm)
    select: SelectForm = Field(default_factory=SelectForm)
    groups: tuple[GroupForm, ...] = Field(
        default=(),
        description="Parts of a checkpoint with budgets of their own.",
        json_schema_extra={"minItems": 1},
    )

    @field_validator("groups", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError("expected a list of mappings")
        return tuple(value)

    def resolved(self) -> tuple[GroupForm, ...]:
        """The groups with what they have from the top level; one group if there are none."""
        top: dict[str, Any] = {name: getattr(self, name) for name in BudgetForm.model_fields}
        is_raw = self.version == 1
        if not self.groups:
            whole = GroupForm.model_construct(**top, select=self.select)
            return (_with_normalize(whole, self.normalize, is_raw),)
        return tuple(
            _with_normalize(_with_defaults(group, top), group.normalize, is_raw)
            for group in self.groups
        )


def _with_defaults(group: GroupForm, top: dict[str, Any]) -> GroupForm:
    own = {
        name: value
        for name in BudgetForm.model_fields
        if (value := getattr(group, name)) is not None
    }
    inherited = dict(top)
    if "score" in own or "method" in own:
        inherited |= {"score": None, "method": None}
    if group.has_amount:
        inherited |= {"sparsity": None, "schedule": None}
    if group.pattern is not None:
        inherited |= {"limits": None, "budget": None, "scope": None}
    if group.scope in ("layer", "row"):
        inherited |= {"budget": None}
    return GroupForm.model_construct(**(inherited | own), select=group.select)


def _with_normalize(group: GroupForm, own: str | None, is_raw: bool) -> GroupForm:
    """A group with the default; without what it has from the top level, if that has no effect.

    Args:
        group: with what it has from the top level.
        own: what the group itself says.
        is_raw: whether the recipe's version has no normalisation by default.
    """
    default = "none" if is_raw else recipes.default_normalization(group.ranked_by)
    normalize = (group.normalize or default) if group.is_normalizable else own
    return group.model_copy(update={"normalize": normalize})


class _WithoutNull(GenerateJsonSchema):
    """A key without a value is an error, so null is neither a type nor a default."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # it is the key once more

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        result = super().default_schema(schema)
        if result.get("default", 0) in (None, []):
            del result["default"]
        return result


def recipe_schema() -> dict[str, Any]:
    """The schema, as plain values."""
    schema = RecipeForm.model_json_schema(schema_generator=_WithoutNull)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


_AMOUNTS = ("sparsity", "pattern", "schedule")
_BESIDE_PATTERN = "has no place beside 'pattern', which says how much and where."


def check(document: object, problems: Problems, where: str) -> RecipeForm:
    """Check a recipe.

    Args:
        document: plain values, as from YAML or JSON.
        problems: those that are known already.
        where: what the recipe is called in the message.

    Raises:
        RecipeError: with every problem.
    """
    document = _plain(document)
    recipe = None
    _check_nulls(document, problems)
    if isinstance(document, dict):
        _check_keys(document, problems)
    try:
        recipe = RecipeForm.model_validate(document)
    except ValidationError as error:
        for mistake in error.errors(include_url=False):
            path, found = mistake["loc"], f", found {shown(mistake['input'])}"
            if mistake["type"] == "missing":
                found = ""
            elif mistake["input"] is None and path:
                continue  # it has no value, or one that could not be read
            problems.add(path, f"{mistake['msg']}{found}.")
    if recipe is not None and not problems:
        _check_values(recipe, problems)
    if problems or recipe is None:
        raise RecipeError(where, problems)
    return recipe


def _plain(value: object) -> object:
    """Mappings of any kind as dicts, which is what pydantic takes."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def shown(value: object) -> str:
    """A value and its type, for a message; shortened if it is long."""
    text = repr(value)
    return f"{text if len(text) < 80 else text[:76] + ' ...'} ({type(value).__name__})"


def _check_nulls(document: object, problems: Problems, path: KeyPath = ()) -> None:
    """Check that every key has a value: the form takes None for a key that is left out."""
    if document is None and path and not problems.has(path):
        problems.add(path, "has no value; give it one, or leave the key out.")
    elif isinstance(document, dict):
        for key, value in document.items():
            _check_nulls(value, problems, (*path, key))


def _check_keys(document: Mapping[str, Any], problems: Problems) -> None:
    """Check which keys stand beside each other; their values may be wrong."""
    groups = document.get("groups")
    tables: list[tuple[KeyPath, Any]] = [((), document)]
    if isinstance(groups, list | tuple) and groups:
        tables += [(("groups", i), group) for i, group in enumerate(groups)]
        if "select" in document:
            problems.add(("select",), "goes into each of the groups, if there are any.")
        if "pattern" in document:
            problems.add(("groups",), _BESIDE_PATTERN)
    has_groups = len(tables) > 1
    for path, table in tables:
        if not isinstance(table, Mapping):
            continue
        _check_table(table, path, problems)
        has_amount = _has_amount(table)
        if has_groups:
            has_amount |= path == () or _has_amount(document)
        if not has_amount and "groups" not in table:
            problems.add(path, "has no 'sparsity', 'pattern' or 'schedule'; expected one of them.")


def _has_amount(table: Mapping[str, Any]) -> bool:
    return any(key in table for key in _AMOUNTS)


def _check_table(table: Mapping[str, Any], path: KeyPath, problems: Problems) -> None:
    if "score" in table and "method" in table:
        text = "is given beside 'score', and means the same; leave it out."
        problems.add((*path, "method"), text)
    if "pattern" in table:
        for key in ("sparsity", "schedule", "scope", "budget", "limits"):
            if key in table:
                problems.add((*path, key), _BESIDE_PATTERN)
    elif "sparsity" in table and "schedule" in table:
        text = "is given beside 'sparsity'; expected one of the two."
        problems.add((*path, "schedule"), text)


def _check_values(recipe: RecipeForm, problems: Problems) -> None:
    """Check values that have no effect beside others; each of them is right by itself."""
    groups = recipe.resolved()
    for i, group in enumerate(groups):
        path: KeyPath = ("groups", i) if recipe.groups else ()
        _check_share(group, path, problems)
        _check_normalize(group, path, problems)
    is_used = any(group.is_normalizable for group in groups)
    if recipe.groups and recipe.normalize not in (None, "none") and not is_used:
        problems.add(("normalize",), "has no effect in any of the groups; leave it out.")
    ranked_by = {group.ranked_by for group in groups}
    of_budget = any(group.budget == recipes.BUDGET_FROM_STATISTICS for group in groups)
    if (
        recipe.statistics is not None
        and ranked_by.isdisjoint(recipes.FROM_STATISTICS)
        and not of_budget
    ):
        text = (
            f"score {listed(recipes.FROM_STATISTICS)}, or budget {recipes.BUDGET_FROM_STATISTICS!r}"
        )
        problems.add(("statistics",), f"has no effect without {text}; leave it out.")
    if recipe.scores is not None and ranked_by.isdisjoint(recipes.FROM_FILES):
        text = f"has no effect without score {listed(recipes.FROM_FILES)}; leave it out."
        problems.add(("scores",), text)
    if recipe.seed is not None and "random" not in ranked_by:
        problems.add(("seed",), "has no effect without score 'random'; leave it out.")


def _check_share(group: GroupForm, path: KeyPath, problems: Problems) -> None:
    """Check limits and a budget, which divide one total among tensors."""
    has_own_shares = group.scope in ("layer", "row")
    same = f"has no effect with scope {group.scope!r}, where every tensor loses the same share;"
    if group.limits is not None and group.limits.has_effect and has_own_shares:
        way_out = "leave it out, or rank all tensors together (scope 'global')."
        problems.add((*path, "limits"), f"{same} {way_out}")
    if group.budget is not None and has_own_shares:
        problems.add((*path, "budget"), f"{same} leave one of them out.")


def _check_normalize(group: GroupForm, path: KeyPath, problems: Problems) -> None:
    if group.normalize in (None, "none") or group.is_normalizable:
        return
    if group.pattern is not None:
        beside = "beside a pattern, which compares weights of one tensor"
    elif group.budget is not None:
        beside = "beside a budget, with which weights of one tensor are compared"
    elif group.scope in ("layer", "row"):
        beside = f"with scope {group.scope!r}, which compares weights of one tensor"
    else:
        beside = "with score 'random', which does not depend on the weights"
    problems.add((*path, "normalize"), f"has no effect {beside}; leave it out.")
