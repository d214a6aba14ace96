"""Modules, and calls of the functions of both libraries, that hypothesis draws."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from equal_modules import HALF, KINDS, KINDS_IN_HALF, distinct, fill_distinct
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn

STABLE = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

GOOD_AMOUNTS = [0, 1, 2, 3, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]
ODD_AMOUNTS = [Fraction(1, 3), np.int64(2), np.float32(0.3), np.float64(0.6)]
BAD_AMOUNTS = [10**6, -1, 1.1, -0.1, math.inf, "0.5", None, 0.5j, torch.tensor(0.5)]


class Scores(NamedTuple):
    """Importance scores: of the parameter's shape, or of another one."""

    dtype: torch.dtype
    seed: int
    fits: bool

    def of(self, weight: Tensor) -> Tensor:
        shape = weight.shape if self.fits else [*weight.shape, 2]
        return distinct(shape, self.dtype, self.seed)


class Mask(NamedTuple):
    dtype: torch.dtype
    seed: int
    fits: bool

    def of(self, weight: Tensor) -> Tensor:
        shape = weight.shape if self.fits else [*weight.shape, 2]
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, 2, list(shape), generator=generator).to(self.dtype)


class Step(NamedTuple):
    """One call of one function of the libraries, and whether an optimizer step precedes it."""

    function: str
    arguments: dict[str, Any]
    trains_before: bool

    def run(self, library: Any, module: nn.Module, name: str) -> None:
        weight = getattr(module, name)
        arguments = {
            key: value.of(weight) if isinstance(value, (Scores, Mask)) else value
            for key, value in self.arguments.items()
        }
        getattr(library, self.function)(module, name, **arguments)


amounts = st.one_of(
    *[st.sampled_from(GOOD_AMOUNTS)] * 5, st.sampled_from(ODD_AMOUNTS), st.sampled_from(BAD_AMOUNTS)
)
dims = st.one_of(
    *[st.sampled_from([0, 1, -1, -2])] * 4, st.sampled_from([2, 3, -3, 5, -6, 1.0, None, "0"])
)
norm_orders = st.one_of(
    *[st.sampled_from([1, 2, 2.0, 3, 0.5, math.inf, -math.inf])] * 3,
    st.sampled_from([0, None, "fro", "nuc", "other"]),
)
seeds = st.integers(0, 10**6)
score_dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64])
scores = st.one_of(
    st.none(),
    st.none(),
    st.builds(Scores, score_dtypes, seeds, st.sampled_from([True, True, True, False])),
)
masks = st.builds(
    Mask,
    st.sampled_from([torch.float32, torch.bool, torch.int64]),
    seeds,
    st.sampled_from([True, True, True, False]),
)
ARGUMENTS = {
    "l1_unstructured": {"amount": amounts, "importance_scores": scores},
    "random_unstructured": {"amount": amounts},
    "ln_structured": {
        "amount": amounts,
        "n": norm_orders,
        "dim": dims,
        "importance_scores": scores,
    },
    "random_structured": {"amount": amounts, "dim": dims},
    "custom_from_mask": {"mask": masks},
    "identity": {},
    "remove": {},
}
OFTEN = ["l1_unstructured", "ln_structured", "random_unstructured", "random_structured"]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    function = draw(st.one_of(st.sampled_from(OFTEN), st.sampled_from(list(ARGUMENTS))))
    arguments = {key: draw(value) for key, value in ARGUMENTS[function].items()}
    return Step(function, arguments, draw(st.booleans()))


@st.composite
def modules(draw: st.DrawFn) -> tuple[nn.Module, str, tuple[Tensor, ...]]:
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, *HALF]))
    kind = KINDS[draw(st.sampled_from(KINDS_IN_HALF if dtype in HALF else list(KINDS)))]
    a, b = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    module = fill_distinct(kind.make(a, b), dtype, draw(seeds))
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in kind.inputs(a, b)]
    # One name in twenty is of no parameter.
    name = draw(st.sampled_from([*kind.names * (19 // len(kind.names)), "weights"]))
    return module, name, tuple(inputs)
