"""Sums of |w| along rows and columns: exact to the grid, and the same however they are added."""

import itertools
from fractions import Fraction

import pytest
import torch

from distprune.base.blocks import WeightLayout
from distprune.ranking import sums as module
from distprune.ranking.chunks import Part
from distprune.ranking.scores import ScoreSource
from distprune.ranking.sums import Scored, Summed, magnitude_sums
from distprune.shards.geometry import IndexMap, MatrixRun
from helpers.virtual_ranks import run_virtual_ranks

LAYOUTS = [
    WeightLayout("linear", (7, 12)),
    WeightLayout("conv1d_of_transformers", (12, 7)),
    WeightLayout("convolution", (6, 2, 3, 3), 3),
    WeightLayout("convolution", (4, 5, 2)),
    WeightLayout("experts", (3, 4, 5)),
    WeightLayout("transposed_experts", (3, 5, 4)),
]


def weight_of(layout, dtype):
    """Magnitudes over many powers of two, a row of zeros, and a mask."""
    g = torch.Generator().manual_seed(0)
    values = torch.randn(layout.shape, generator=g, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-30, 30, layout.shape, generator=g)
    values.view(layout.shape[0], -1)[1] = 0.0
    mask = torch.rand(layout.shape, generator=g) < 0.8
    values.view(-1)[3], mask.view(-1)[3] = float("inf"), False
    return values.to(dtype), mask


def numbers_of(layout):
    inputs = torch.arange(layout.num_inputs).view(layout.input_shape)
    return layout.of_inputs(inputs), layout.of_outputs(torch.arange(layout.num_outputs))


def sums(layout, values, mask, num_ranks=1):
    numbers = numbers_of(layout)
    index = IndexMap(
        tuple(map(range, layout.shape)), values.stride(), 0, 0, tuple(range(values.ndim))
    )
    matrix = MatrixRun.of(index, numbers)
    places = [matrix.matrix_of(each, layout.shape) for each in numbers]

    def add_up(communicator):
        first, last = (
            values.numel() * (communicator.index + more) // communicator.size for more in (0, 1)
        )
        part = Part("w", values.numel(), index, range(first, last), mask.view(-1))
        scored = Scored(part, ScoreSource(values.view(-1)))
        weight = Summed(scored, matrix, places, (layout.num_inputs, layout.num_outputs))
        return magnitude_sums([weight, weight], communicator)

    (found, again), *others = run_virtual_ranks(add_up, num_ranks)
    for other in (again, *itertools.chain(*others)):
        assert all(map(torch.equal, found, other))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_exact_and_have_no_order(layout, dtype, monkeypatch):
    values, mask = weight_of(layout, dtype)
    found = sums(layout, values, mask)
    flat, live = values.double().flatten().tolist(), mask.flatten().tolist()
    for number, of_kind in zip(numbers_of(layout), found, strict=True):
        places = number.expand(layout.shape).flatten().tolist()
        exact, largest, count = {}, {}, {}
        for place, value, is_live in zip(places, flat, live, strict=True):
            magnitude = abs(Fraction(value)) if is_live else Fraction(0)
            exact[place] = exact.get(place, Fraction(0)) + magnitude
            largest[place] = max(largest.get(place, Fraction(0)), magnitude)
            count[place] = count.get(place, 0) + 1
        assert len(exact) == of_kind.numel()
        for place, total in exact.items():
            error = abs(Fraction(of_kind[place].item()) - total)
            assert error <= largest[place] * count[place] / 2**36
            assert (of_kind[place] == 0) == (total == 0)
    assert all(map(torch.equal, found, sums(layout, values, mask, num_ranks=3)))
    monkeypatch.setattr(module.memory, "takes_numpy", lambda device: False)
    assert all(map(torch.equal, found, sums(layout, values, mask)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named(value):
    values, mask = weight_of(LAYOUTS[0], torch.float32)
    values[0, 0], mask[0, 0] = value, True
    with pytest.raises(ValueError, match=r"w, w: the sum of its magnitudes is not finite"):
        sums(LAYOUTS[0], values, mask)
