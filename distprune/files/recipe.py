"""What to do with a checkpoint: checked when it is made, and written with every default."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

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
        exclude: patterns of tensors to leave alone.
        min_ndim: tensors of fewer dimensions are left alone.
        nan: a NaN in a selected tensor is an "error", or is to be kept ("keep").
        masks: whether to write the masks.
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
    exclude: tuple[str, ...] = ()
    min_ndim: int = 2
    nan: Literal["error", "keep"] = "error"
    masks: bool = True
    card: bool = True

    def __post_init__(self) -> None:
        problems = [*self._amount_problems(), *self._choice_problems()]
        for field in ("include", "exclude"):
            patterns = getattr(self, field)
            if patterns is not None:
                problems += _pattern_problems(field, patterns)
                object.__setattr__(self, field, tuple(patterns))
        if not _is_int(self.min_ndim) or self.min_ndim < 1:
            problems.append(f"min_ndim is {self.min_ndim!r}; expected an int >= 1.")
        problems += [
            f"{field} is {getattr(self, field)!r}; expected true or false."
            for field in ("masks", "card")
            if not isinstance(getattr(self, field), bool)
        ]
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

    def to_yaml(self) -> str:
        """A YAML file with every field; values are JSON, which YAML contains."""
        lines = [f"{key}: {json.dumps(value)}" for key, value in asdict(self).items()]
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

    def _choice_problems(self) -> list[str]:
        choices = {
            "scope": ("global", "layer", "row"),
            "score": ("magnitude", "random"),
            "nan": ("error", "keep"),
        }
        return [
            f"{field} is {getattr(self, field)!r}; expected one of {', '.join(map(repr, allowed))}."
            for field, allowed in choices.items()
            if getattr(self, field) not in allowed
        ]


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
