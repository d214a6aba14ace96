"""What to do with a checkpoint: checked when it is made, and written with every default."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from distprune.files.errors import SelectionError, counted

Scope = Literal["global", "layer", "row"]
Score = Literal["magnitude", "random"]


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

    def __post_init__(self) -> None:
        problems = [*self._amount_problems(), *self._choice_problems()]
        for name in ("include", "also", "exclude"):
            patterns = getattr(self, name)
            if patterns is not None:
                problems += _pattern_problems(name, patterns)
                object.__setattr__(self, name, tuple(patterns))
        if self.also and self.include is not None:
            problems.append(
                "also adds to what is pruned without include, and include is given; leave one out."
            )
        problems += self._dims_problems()
        if not _is_int(self.min_ndim) or self.min_ndim < 1:
            problems.append(f"min_ndim is {self.min_ndim!r}; expected an int >= 1.")
        if not isinstance(self.masks, bool):
            problems.append(f"masks is {self.masks!r}; expected true or false.")
        if self.score != "random" and self.seed is not None:
            problems.append("seed has no effect without score 'random'; leave it out.")
        elif self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**63):
            problems.append(f"seed is {self.seed!r}; expected an int >= 0.")
        if problems:
            raise SelectionError(counted("the recipe", problems), problems)
        if self.score == "random" and self.seed is None:
            object.__setattr__(self, "seed", 0)
        if self.sparsity is not None:
            object.__setattr__(self, "sparsity", float(self.sparsity))

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

    def to_yaml(self) -> str:
        """A YAML file with every field; values are JSON, which YAML contains."""
        values = {**asdict(self), "input_dims": dict(self.input_dims)}
        lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
        return "\n".join(["version: 1", *lines]) + "\n"

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
        sparsity = self.sparsity
        if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)):
            return [f"sparsity is {sparsity!r}; expected a number from 0 to 1."]
        if math.isnan(sparsity) or not 0 <= sparsity <= 1:
            return [f"sparsity is {sparsity!r}; expected a number from 0 to 1."]
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


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
