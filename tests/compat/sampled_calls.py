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

from helpers.models import target

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
    names: list[str]
    arguments: dict[str, Any]
    trains_before: bool

    @property
    def is_global(self) -> bool:
        return self.function == "global_unstructured"

    def scores(self, model: nn.Module) -> dict[str, Tensor]:
        """By name; those of a global call are all different, and of every second parameter."""
        given = self.arguments.get("importance_scores")
        if given is None:
            return {}
        weights = {name: getattr(*target(model, name)) for name in self.names}
        if not self.is_global:
            return {name: given.of(weight) for name, weight in weights.items()}
        scored = list(weights.items())[::2]
        sizes = [weight.numel() for _, weight in scored]
        drawn = distinct([sum(sizes)], given.dtype, given.seed).split(sizes)
        return {
            name: part.view(weight.shape)
            for (name, weight), part in zip(scored, drawn, strict=True)
        }

    def run(self, library: Any, model: nn.Module) -> None:
        pairs = [target(model, name) for name in self.names]
        arguments, scores = dict(self.arguments), self.scores(model)
        if self.is_global:
            method = getattr(library, arguments.pop("method"))
            given = {target(model, name): each for name, each in scores.items()}
            arguments["importance_scores"] = given or None
            if method is library.Identity:
                del arguments["amount"]
            library.global_unstructured(pairs, method, **arguments)
            return
        if scores:
            (arguments["importance_scores"],) = scores.values()
        if "mask" in arguments:
            arguments["mask"] = arguments["mask"].of(getattr(*pairs[0]))
        getattr(library, self.function)(*pairs[0], **arguments)


amounts = st.one_of(
    *[st.sampled_from(GOOD_AMOUNTS)] * 5, st.sampled_from(ODD_AMOUNTS), st.sampled_from(BAD_AMOUNTS)
)
dims = st.one_of(
    *[st.sampled_from([0, 1, -1, -2])] * 4, st.sampled_from([2, 3, -3, 5, -6, 1.0, None, "0"])
)
norm_orders = st.one_of(
    *[st.sampled_from([1, 2, 2.0, 3, 0.5, math.inf, -math.inf])] * 3,
    # From torch 2.14 on, it refuses None, and other names by other errors.
    st.sampled_from([0, "fro", *[None, "nuc", "other"] * (torch.__version__ < (2, 14))]),
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
    "global_unstructured": {
        "amount": amounts,
        "method": st.sampled_from(
            ["L1Unstructured"] * 4 + ["RandomUnstructured"] * 2 + ["Identity"]
        ),
        "importance_scores": st.none()
        | st.builds(Scores, st.just(torch.float32), seeds, st.just(True)),
    },
}
OFTEN = ["l1_unstructured", "ln_structured", "random_unstructured", "random_structured"]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[nn.Module, tuple[Tensor, ...], list[Step]]:
    """A model, its inputs, and calls of functions on its parameters."""
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, *HALF]))
    kind = KINDS[draw(st.sampled_from(KINDS_IN_HALF if dtype in HALF else list(KINDS)))]
    a, b = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    model = fill_distinct(kind.make(a, b), dtype, draw(seeds))
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in kind.inputs(a, b)]
    # One name in twenty is of no parameter.
    name = draw(st.sampled_from([*kind.names * (19 // len(kind.names)), "weights"]))
    every = st.sampled_from(list(ARGUMENTS))
    functions = st.sampled_from(OFTEN) | st.just("global_unstructured") | every

    def step() -> Step:
        function, names = draw(functions), [name]
        if function == "global_unstructured":
            names = draw(st.lists(st.sampled_from([*kind.names, name]), min_size=1, unique=True))
        arguments = {key: draw(value) for key, value in ARGUMENTS[function].items()}
        if arguments.get("n") in ("nuc", "other"):
            arguments["amount"] = 1  # where nothing goes, torch computes norms all the same
        return Step(function, names, arguments, draw(st.booleans()))

    return model, tuple(inputs), [step() for _ in range(draw(st.integers(1, 4)))]
