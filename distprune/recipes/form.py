"""The keys of a recipe and the values that each may have: the only model of a recipe.

A recipe is a mapping, usually from a YAML file. :class:`RecipeForm` is the whole of it and
:class:`GroupForm` an item of ``groups``. The JSON schema is made from these classes. Rules about
keys that exclude each other are in ``checking``: they are checked even if values are wrong.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from distprune import recipes
from distprune._common import blocks
from distprune._common.blocks import Pattern
from distprune._common.schedules import SCHEDULES, Schedule
from distprune._common.selecting import check_pattern


def listed(values: Sequence[object]) -> str:
    """ "'a', 'b' or 'c'"."""
    *rest, last = map(repr, values)
    return f"{', '.join(rest)} or {last}" if rest else last


def choice_text(choices: Sequence[str | int], value: object) -> str:
    """The choices, with the one that is close to a value."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return listed(choices) + (f" (did you mean {close[0]!r}?)" if close else "")


def compile_pattern(pattern: str) -> None:
    """Check a regular expression after "re:"; globs are always right.

    Raises:
        ValueError: with what was expected.
    """
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"a regular expression after 're:' ({error})") from error


def input_dims_pairs(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dimensions by pattern, {"*.c_fc.weight": 0}, as pairs; a dimension alone or a list of them.

    Raises:
        ValueError: with what was expected.
    """
    expected = "dimensions by pattern, such as {'*.c_fc.weight': 0}"
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


def expected(text: str) -> PydanticCustomError:
    """An error that is reported as "expected <text>, found <value>"."""
    return PydanticCustomError("expected", "{text}", {"text": text})


def problem(text: str, key: str | None = None) -> PydanticCustomError:
    """An error that is reported as it is, for one key of the mapping or for the whole of it."""
    return PydanticCustomError("problem", "{text}", {"text": text, "key": key})


def _or_expected(text: str) -> WrapValidator:
    """Replace whatever pydantic says about a wrong value by "expected <text>"."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise expected(text + _hint(value)) from None

    return WrapValidator(check)


def _hint(value: Any) -> str:
    """YAML reads 1e-3 as text."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return ""
    return f"; write it as {number!r}" if math.isfinite(number) else ""


def _or_as_expected(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Convert a value; a ValueError of ``convert`` says what was expected."""

    def check(value: Any) -> Any:
        try:
            return convert(value)
        except ValueError as error:
            raise expected(str(error)) from None

    return check


def _checked(convert: Callable[[Any], Any], input_type: Any) -> BeforeValidator:
    return BeforeValidator(_or_as_expected(convert), json_schema_input_type=input_type)


def _texts(value: Any) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values:
        raise ValueError("a string or a list of strings")
    if not all(isinstance(text, str) and text for text in values):
        raise ValueError("strings that are not empty")
    return tuple(values)


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = _texts(value)
    for pattern in patterns:
        compile_pattern(pattern)
    return patterns


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("the path of a file or a folder")
    return value


def _one_of(*choices: str | int) -> WrapValidator:
    """Report a value that is none of the choices, with the one that is close to it."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            if isinstance(value, bool):  # True == 1
                raise expected(choice_text(choices, value))
            return handler(value)
        except ValidationError:
            raise expected(choice_text(choices, value)) from None

    return WrapValidator(check)


_Text = Annotated[str, Field(min_length=1)]
_TextOrTexts = _Text | Annotated[list[_Text], Field(min_length=1)]
_Dims = int | Annotated[list[int], Field(min_length=1)]
_PatternText = Annotated[str, Field(pattern="^[0-9]{1,4}[:x][0-9]{1,4}$")]

Version = Annotated[Literal[1, 2], _one_of(1, 2)]
Score = Annotated[recipes.Score, _one_of(*get_args(recipes.Score))]
Normalize = Annotated[Literal["rms", "l2", "mean", "none"], _one_of("rms", "l2", "mean", "none")]
Scope = Annotated[blocks.Scope, _one_of(*get_args(blocks.Scope))]
Budget = Annotated[recipes.Budget, _one_of(*get_args(recipes.Budget))]
Nan = Annotated[Literal["error", "keep"], _one_of("error", "keep")]
Share = Annotated[
    float, Field(ge=0, le=1, allow_inf_nan=False), _or_expected("a number from 0 to 1")
]
Step = Annotated[int, Field(ge=0), _or_expected("a whole number >= 0")]
Positive = Annotated[int, Field(ge=1), _or_expected("a whole number >= 1")]
Seed = Annotated[int, Field(ge=0, lt=2**63), _or_expected("a whole number >= 0 and < 2**63")]
Flag = Annotated[bool, _or_expected("true or false")]
Texts = Annotated[tuple[str, ...], _checked(_texts, _TextOrTexts)]
Patterns = Annotated[tuple[str, ...], _checked(_patterns, _TextOrTexts)]
PathText = Annotated[str, _checked(_path, _Text)]
PatternOfZeros = Annotated[
    Pattern,
    PlainValidator(_or_as_expected(Pattern.parse), json_schema_input_type=_PatternText),
]
InputDims = Annotated[
    tuple[tuple[str, tuple[int, ...]], ...], _checked(input_dims_pairs, dict[str, _Dims])
]


class Section(BaseModel):
    """A mapping of a recipe. Unknown keys are errors; so is None, see ``checking``."""

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
            raise problem("adds to the default, which 'include' replaces; leave one out.", "also")
        return self


class LimitsForm(Section):
    """Limits of the sparsity of every single parameter, for the scope global."""

    min_sparsity: Share = 0.0
    max_sparsity: Share = 1.0

    @model_validator(mode="after")
    def _floor_below_ceiling(self) -> LimitsForm:
        if self.min_sparsity > self.max_sparsity:
            raise problem(
                f"min_sparsity {self.min_sparsity} is above max_sparsity {self.max_sparsity}."
            )
        return self

    @property
    def has_effect(self) -> bool:
        return (self.min_sparsity, self.max_sparsity) != (0.0, 1.0)


class OutputForm(Section):
    """What is written beside a pruned checkpoint."""

    masks: Flag = Field(default=True, description="The masks.")
    card: Flag = Field(default=True, description="A README.md that says what was done.")


class ScheduleForm(Section):
    """The sparsity at each step."""

    @model_validator(mode="after")
    def _goes_together(self) -> ScheduleForm:
        try:
            self.as_schedule()
        except ValueError as error:
            raise problem(str(error)) from None
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

    score: Score | None = Field(
        default=None,
        description="What ranks weights. wanda, stade, ria and fisher need statistics; taylor, "
        "elementwise_fisher and given need scores, and prune --text makes those of the first two. "
        "All these are for checkpoints only. Default: magnitude.",
    )
    method: Score | None = Field(default=None, description="The same as score.")
    scope: Scope | None = Field(
        default=None,
        description="What is ranked together: everything, each tensor, or each output row. "
        "Default: global.",
    )
    normalize: Normalize | None = Field(
        default=None,
        description="What magnitudes are divided by before all tensors are ranked together: the "
        "rms, the l2 norm or the mean magnitude of their tensor, or nothing. Default: rms; for "
        "scores fisher, taylor and elementwise_fisher, and in recipes of version 1: none.",
    )
    budget: Budget | None = Field(
        default=None,
        description="How the pruned weights are divided among the tensors, with the scope global: "
        "one of the rules of distprune.budgets. owl needs statistics, and is for checkpoints only. "
        "Default: one ranking of all tensors.",
    )
    pattern: PatternOfZeros | None = Field(
        default=None,
        description="N:M instead of a sparsity: N of every M in a row are kept. AxB beside a "
        "sparsity: whole tiles of A outputs and B inputs are pruned.",
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
    def has_amount(self) -> bool:
        return not (self.sparsity is None and self.schedule is None and not self.is_n_of_m)

    @property
    def is_n_of_m(self) -> bool:
        """Whether there is a pattern N:M, which is an amount by itself."""
        return self.pattern is not None and self.pattern.tile is None

    @property
    def is_normalizable(self) -> bool:
        """Whether the order of the weights depends on what each tensor is divided by."""
        return recipes.is_normalizable(
            self.scope, self.pattern, self.budget, self.score or self.method
        )


class GroupForm(BudgetForm):
    """A part of a model with a budget of its own; it has what differs from the top level."""

    select: SelectForm = Field(description="The parameters of this group.")


class _HeadForm(Section):
    version: Version = Field(description="Of this format.")
    seed: Seed | None = Field(default=None, description="Of the score random.")


class RecipeForm(BudgetForm, _HeadForm):
    """What to prune, how much, and when."""

    model_config = ConfigDict(title="A recipe of distprune")

    nan: Nan = Field(
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
        description="Parts of a model with budgets of their own.",
        json_schema_extra={"minItems": 1},
    )

    @field_validator("groups", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            raise expected("a list of mappings")
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
        inherited |= {"limits": None, "budget": None}
        inherited |= {"scope": None} if group.is_n_of_m else {}
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
    default = "none" if is_raw else recipes.default_normalization(group.score or group.method)
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
