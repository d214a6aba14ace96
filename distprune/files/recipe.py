"""What to do with a checkpoint: checked when it is made, and written with every default."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from distprune.files.errors import SelectionError, headline
from distprune.files.formats.yaml_text import yaml_text

Scope = Literal["global", "layer", "row"]
Score = Literal["magnitude", "random"]


# Each group has at least one unit of work, and so one histogram; see files/units.py.
MAX_GROUPS = 128
# Of the recipe as a whole; everything else is said in each group.
_SHARED = ("seed", "nan", "masks", "card", "groups")


@dataclass(frozen=True)
class FileRecipe:
    """How to prune a checkpoint.

    Attributes:
        sparsity: the share of elements to prune, in [0, 1]: of all selected tensors together,
            of each tensor, or of each row, as ``scope`` says; rounded to a count, halves to even.
        scope: what is ranked together: "global" all selected tensors, "layer" each tensor, "row"
            each output row.
        pattern: instead of a sparsity, "N:M": of every M neighbours along the input dimension, N
            are kept.
        score: "magnitude", or "random": the numbers that ``RandomUnstructured`` would draw.
        seed: of random scores; 0 by default.
        include: globs, or regular expressions after ``re:``, for whole names of tensors; None:
            matrices that are no embedding, head, norm, router, bias or scale.
        also: patterns of tensors to prune besides what is pruned without ``include``.
        exclude: patterns of tensors to leave alone, whatever selects them.
        min_ndim: tensors of fewer dimensions are left alone; those of size 1 do not count.
        input_dims: by pattern, the dimensions that an output sums over: the one that N:M goes
            along, and the last ones, if they are the kernel of a convolution. The first pattern
            that matches counts. For tensors whose layout nothing else tells. Given as a mapping
            or as pairs; kept as pairs.
        nan: a NaN in a selected tensor is an "error", or is to be kept ("keep").
        masks: whether to write the masks.
        min_sparsity, max_sparsity: limits of every single tensor, in [0, 1], for the scope
            "global"; floors are rounded up to a count, and ceilings down. The total stays exact.
        groups: instead of a sparsity and a selection, budgets for parts of the checkpoint: recipes
            that are ranked each on its own. A tensor is in one group, or in none and is left
            alone. ``seed``, ``nan``, ``masks`` and ``card`` are those of this recipe.
        card: whether README.md of the result tells of the pruning, above the text of the source's;
            false copies that of the source.

    Raises:
        SelectionError: with every field that is wrong.
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

    def __post_init__(self) -> None:
        problems = self._choice_problems()
        if self.groups:
            problems += self._take_in_groups()
        else:
            object.__setattr__(self, "groups", ())
            problems = [*self._amount_problems(), *problems, *self._limit_problems()]
        for name in ("include", "also", "exclude"):
            patterns = getattr(self, name)
            if patterns is None and name != "include":
                problems.append(f"{name} is None; expected a list of patterns.")
            elif patterns is not None:
                problems += _pattern_problems(name, patterns)
                object.__setattr__(self, name, tuple(patterns))
        if self.also and self.include is not None:
            problems.append(
                "also adds to what is pruned without include, and include is given; leave one out."
            )
        problems += self._dims_problems()
        if not _is_int(self.min_ndim) or self.min_ndim < 1:
            problems.append(f"min_ndim is {self.min_ndim!r}; expected an int >= 1.")
        problems += [
            f"{field} is {getattr(self, field)!r}; expected true or false."
            for field in ("masks", "card")
            if not isinstance(getattr(self, field), bool)
        ]
        is_random = any(each.score == "random" for each in self.parts)
        if not is_random and self.seed is not None:
            problems.append("seed has no effect without score 'random'; leave it out.")
        elif self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            problems.append(f"seed is {self.seed!r}; expected an int >= 0.")
        if problems:
            raise SelectionError(headline("the recipe", problems), problems)
        if is_random and self.seed is None:
            object.__setattr__(self, "seed", 0)
        for field in ("sparsity", "min_sparsity", "max_sparsity"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, float(getattr(self, field)))
        if self.groups:
            shared = {"nan": self.nan, "masks": self.masks, "card": self.card}
            object.__setattr__(
                self,
                "groups",
                tuple(
                    replace(each, **shared, seed=self.seed if each.score == "random" else None)
                    for each in self.groups
                ),
            )

    @property
    def parts(self) -> tuple[FileRecipe, ...]:
        """The groups; this recipe itself if it has none."""
        return self.groups or (self,)

    @property
    def is_together(self) -> bool:
        """Whether all tensors are ranked together, not each of them or each row on its own."""
        return self.scope == "global" and self.pattern is None

    @property
    def has_limits(self) -> bool:
        return (self.min_sparsity, self.max_sparsity) != (0.0, 1.0)

    @property
    def kept_of(self) -> tuple[int, int] | None:
        """(N, M) of the pattern."""
        if self.pattern is None:
            return None
        kept, group = self.pattern.split(":")
        return int(kept), int(group)

    @property
    def goes_along_inputs(self) -> bool:
        """Whether it matters along which dimension the inputs of a tensor lie."""
        return self.pattern is not None or self.scope == "row"

    def as_mapping(self) -> dict[str, Any]:
        """The keys of a recipe file, every default filled in; ``parse_recipe`` reads them again."""
        values: dict[str, Any] = {"version": 1}
        if self.seed is not None:
            values["seed"] = self.seed
        if self.groups:
            values["groups"] = [each._part_as_mapping() for each in self.groups]
        else:
            values |= self._part_as_mapping()
        return values | {"nan": self.nan, "output": {"masks": self.masks, "card": self.card}}

    def _part_as_mapping(self) -> dict[str, Any]:
        values: dict[str, Any] = {"score": self.score}
        if self.pattern is not None:
            values["pattern"] = self.pattern
        else:
            values |= {"scope": self.scope, "sparsity": self.sparsity}
        select: dict[str, Any] = {"min_ndim": self.min_ndim}
        if self.include is not None:
            select["include"] = list(self.include)
        if self.also:
            select["also"] = list(self.also)
        if self.exclude:
            select["exclude"] = list(self.exclude)
        if self.input_dims:
            select["input_dims"] = {name: list(dims) for name, dims in self.input_dims}
        values["select"] = select
        if self.has_limits:
            limits = {"min_sparsity": self.min_sparsity, "max_sparsity": self.max_sparsity}
            values["limits"] = limits
        return values

    def to_yaml(self) -> str:
        """A recipe file with every default filled in, which ``distprune prune -r`` reads."""
        return yaml_text(self.as_mapping())

    def _take_in_groups(self) -> list[str]:
        """Make recipes of groups that are mappings; what is wrong."""
        given = self.groups
        object.__setattr__(self, "groups", ())
        if isinstance(given, str | FileRecipe) or not isinstance(given, Sequence):
            return [f"groups is {given!r}; expected a list of recipes."]
        if len(given) > MAX_GROUPS:
            return [f"there are {len(given)} groups; expected at most {MAX_GROUPS}."]
        problems = [
            f"{field.name} is given beside groups; expected it in each of the groups."
            for field in fields(self)
            if field.name not in _SHARED
            and getattr(self, field.name) not in (field.default, [])  # JSON has no tuples
        ]
        found = []
        for number, each in enumerate(given):
            try:
                each = each if isinstance(each, FileRecipe) else FileRecipe(**each)
            except SelectionError as error:
                problems += [f"groups[{number}]: {problem}" for problem in error.problems]
                continue
            except TypeError as error:
                problems.append(f"groups[{number}] is {each!r}; expected a recipe ({error}).")
                continue
            own = asdict(each)
            allowed = {
                "groups": ((),), "masks": (True, self.masks), "card": (True, self.card),
                "nan": ("error", self.nan), "seed": (None, 0, self.seed),
            }  # fmt: skip
            problems += [
                f"groups[{number}]: {field} is {own[field]!r}; expected it beside the groups, for "
                "all of them."
                for field, values in allowed.items()
                if own[field] not in values
            ]
            found.append(each)
        object.__setattr__(self, "groups", tuple(found))
        return problems

    def _limit_problems(self) -> list[str]:
        problems = [
            f"{field} is {value!r}; expected a number from 0 to 1."
            for field in ("min_sparsity", "max_sparsity")
            if not _is_share(value := getattr(self, field))
        ]
        if problems or not self.has_limits:
            return problems
        if self.min_sparsity > self.max_sparsity:
            return [
                f"min_sparsity {self.min_sparsity} is above max_sparsity {self.max_sparsity}; "
                "expected a floor that is not above the ceiling."
            ]
        if not self.is_together:
            how = f"the pattern {self.pattern}" if self.pattern else f"scope {self.scope!r}"
            return [
                f"min_sparsity and max_sparsity have no effect with {how}, where every tensor "
                "loses the same share; leave them out, or rank all tensors together (scope "
                "'global')."
            ]
        return []

    def _amount_problems(self) -> list[str]:
        if self.pattern is not None:
            if self.sparsity is not None or self.scope != "global":
                return ["pattern says how much and where; leave sparsity and scope out."]
            match = isinstance(self.pattern, str) and re.fullmatch(
                r"([0-9]{1,4}):([0-9]{1,4})", self.pattern
            )
            if not match or not 0 < int(match[1]) < int(match[2]):
                return [f"pattern is {self.pattern!r}; expected 'N:M' with 0 < N < M, as in '2:4'."]
            return []
        if self.sparsity is None:
            return ["neither sparsity nor pattern is given; expected one of them."]
        if not _is_share(self.sparsity):
            return [f"sparsity is {self.sparsity!r}; expected a number from 0 to 1."]
        return []

    def _dims_problems(self) -> list[str]:
        try:
            pairs = input_dims_pairs(self.input_dims)
        except ValueError as error:
            return [f"input_dims is {self.input_dims!r}; expected {error}."]
        object.__setattr__(self, "input_dims", pairs)
        return _pattern_problems("input_dims", [pattern for pattern, _ in pairs])

    def _choice_problems(self) -> list[str]:
        choices = {
            "scope": ("global", "layer", "row"),
            "score": ("magnitude", "random"),
            "nan": ("error", "keep"),
        }
        return [
            f"{name} is {getattr(self, name)!r}; expected one of {', '.join(map(repr, allowed))}."
            for name, allowed in choices.items()
            if getattr(self, name) not in allowed
        ]


def input_dims_pairs(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dimensions by pattern, {"*.c_fc.weight": 0}, as pairs; a dimension alone or a list of them.

    Raises:
        ValueError: with what was expected.
    """
    expected = "dimensions by pattern, such as {'*.c_fc.weight': 0}"
    try:
        given = dict(value)  # of pairs too
    except (TypeError, ValueError):
        raise ValueError(expected) from None
    pairs = []
    for pattern, dims in given.items():
        dims = dims if isinstance(dims, list | tuple) else [dims]
        if not isinstance(pattern, str) or not dims or not all(map(_is_int, dims)):
            raise ValueError(expected)
        pairs.append((pattern, tuple(dims)))
    return tuple(pairs)


def _pattern_problems(field: str, patterns: Sequence[str]) -> list[str]:
    if isinstance(patterns, str) or not all(isinstance(each, str) and each for each in patterns):
        return [f"{field} is {patterns!r}; expected a list of patterns."]
    problems = []
    for pattern in patterns:
        try:
            re.compile(pattern[3:] if pattern.startswith("re:") else "")
        except (re.error, RecursionError, OverflowError) as error:
            problems.append(f"{field}: {pattern!r} is no regular expression ({error}).")
    return problems


def _is_share(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not math.isnan(value) and 0 <= value <= 1


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
