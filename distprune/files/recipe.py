"""What to do with a checkpoint: a request without what only training has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from distprune.base.schedules import OneShot
from distprune.files.errors import SelectionError
from distprune.files.text import yaml_text
from distprune.recipes import RecipeError
from distprune.recipes.request import FOR_MODELS, Request

if TYPE_CHECKING:
    from typing_extensions import Self

# What the paths of inputs become in the recipe of a result, beside which the statistics lie.
STORED_STATISTICS = "statistics.safetensors"
STORED_SCORES = "scores"
# Each group has at least one unit of work, and so one histogram; see ``ranking.units``.
MAX_GROUPS = 128


@dataclass(frozen=True)
class FileRecipe(Request):
    """How to prune a checkpoint; the fields are those of :class:`Request`.

    Raises:
        SelectionError: with every field that is wrong; for a schedule or names, which a checkpoint
            has no use for.
        ImportError: pydantic is missing.
    """

    min_ndim: int = 2
    groups: tuple[FileRecipe, ...] = ()

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except RecipeError as error:
            subject = f"the recipe has {len(error.problems)} problem(s):"
            raise SelectionError(subject, error.problems) from error

    @classmethod
    def _made(cls, values: dict[str, Any], where: str) -> Self:
        parts: list[dict[str, Any]] = values["groups"] or [values]
        cls._refuse_what_models_have([values, *parts], where)
        if len(parts) > MAX_GROUPS:
            problems = [f"there are {len(parts)} groups; expected at most {MAX_GROUPS}."]
            raise SelectionError("the recipe has a problem:", problems)
        is_random = any(part["score"] == "random" for part in parts)
        for part in parts:
            if part["schedule"] is not None:
                part["sparsity"], part["schedule"] = part["schedule"].sparsity, None
            if part["min_ndim"] is None:
                part["min_ndim"] = cls.min_ndim
            if part["score"] == "random" and part["seed"] is None:
                part["seed"] = 0
        if is_random and values["seed"] is None:
            values["seed"] = 0
        return super()._made(values, where)

    @classmethod
    def _refuse_what_models_have(cls, mappings: list[dict[str, Any]], where: str) -> None:
        keys = [
            key
            for key, name in FOR_MODELS.items()
            for found in [values.get(name, getattr(cls, name)) for values in mappings]
            if found != getattr(cls, name) and not isinstance(found, OneShot)
        ]
        if keys:
            subject = where if where == "the recipe" else f"the recipe {where}"
            names = ", ".join(dict.fromkeys(keys))
            raise SelectionError(
                f"{subject} has {names}, which a checkpoint has no use for: it is pruned at once, "
                "and patterns match whole names of tensors. Expected 'sparsity' or 'pattern', and "
                "'select' with 'include' and 'exclude'.",
            )

    def by_divisor(self, words: str) -> str:
        """Some words, and what the scores of a tensor are divided by; "" if they are not."""
        if self.normalize is None:
            return ""
        mean = "mean magnitude" if self.ranks_magnitudes else "mean score"
        divisor = {"rms": "rms", "l2": "l2 norm", "mean": mean}[self.normalize]
        return f" {words} {divisor} of its tensor"

    @property
    def score_text(self) -> str:
        """What ranks the weights, in words."""
        score = "given scores" if self.score == "given" else self.score
        return score + self.by_divisor("/")

    def as_fields(self) -> dict[str, Any]:
        """The fields as plain values, for reports and digests.

        Without the fields of models, and those of later versions that are None: reports that were
        made before do not have them.
        """
        values = asdict(self)
        for part in (values, *values["groups"]):
            for name in FOR_MODELS.values():
                del part[name]
            for name in ("normalize", "statistics", "scores", "budget"):
                if part[name] is None:
                    del part[name]
        return values

    def as_stored(self) -> FileRecipe:
        """The recipe as it stands in a result: beside its statistics, and without other paths."""
        return self.replaced(
            statistics=None if self.statistics is None else STORED_STATISTICS,
            scores=None if self.scores is None else STORED_SCORES,
        )

    def to_yaml(self) -> str:
        """A recipe file with every default filled in, which ``distprune prune -r`` reads.

        A recipe with a single group is read as one without groups, which prunes the same.
        """
        return yaml_text(self.as_mapping())
