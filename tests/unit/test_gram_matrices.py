"""Gram matrices of one process: what is shared, experts, convolutions, errors."""

import itertools
import re
from fractions import Fraction

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.base.blocks import WeightLayout
from distprune.ranking import sums as module
from distprune.ranking.chunks import Part
from distprune.ranking.scores import ScoreSource
from distprune.ranking.sums import Scored, magnitude_sums
from distprune.shards.geometry import IndexMap
from distprune.statistics import GramMatrices
from distprune.statistics.gram import add_product
from helpers.collecting import collected, unfolded
from helpers.least_squares import gram_of
from helpers.virtual_ranks import run_virtual_ranks


class Attention(nn.Module):
    """Two layers with one input, and a third that has it in some calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, other=None):
        return self.q(x) + self.k(x) + self.o(x if other is None else other)


def test_layers_with_one_input_share_its_matrix():
    net, x = Attention(), torch.randn(5, 3)
    grams = collected(GramMatrices(prune.select(net)), net, x, 2 * x)
    assert [labels for labels, _ in grams.blocks()] == [["q.weight", "k.weight", "o.weight"]]


def test_layers_part_at_the_first_different_input():
    net = Attention()
    first, second, other = torch.randint(-3, 4, (3, 5, 3)).float()
    grams = GramMatrices(prune.select(net))
    with grams.collecting():
        net(first)
        net(second, other)
        net(first)
    assert [labels for labels, _ in grams.blocks()] == [["q.weight", "k.weight"], ["o.weight"]]
    assert torch.equal(grams.matrix(net.k), (2 * gram_of(first) + gram_of(second)).float())
    assert torch.equal(grams.matrix(net.o), (2 * gram_of(first) + gram_of(other)).float())


def test_an_input_that_is_changed_in_place_counts_as_it_was():
    layer = nn.Linear(2, 2)
    x = torch.tensor([[1.0, 2.0]])
    grams = GramMatrices([(layer, "weight")])
    with grams.collecting():
        layer(x)
        x.zero_()
    assert torch.equal(grams.matrix(layer), torch.tensor([[1.0, 2.0], [2.0, 4.0]]))


def test_calls_have_no_order():
    """Their sum is exact, whatever the scales of features are: ranks may share them in any way."""
    of_features, of_calls = 10 ** (6 * torch.rand(200) - 3), 10 ** (-3 * torch.rand(100, 1, 1))
    calls = list(torch.randn(100, 9, 200) * of_features * of_calls)
    totals = torch.zeros(3, 200, 200, dtype=torch.float64)
    for total, order in zip(totals, (calls, calls[::-1], calls[1::2] + calls[::2]), strict=True):
        for rows in order:
            add_product(total, rows)
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0], totals[2])
    right = gram_of(torch.cat(calls))
    norms = right.diagonal().sqrt()
    assert ((totals[0] - right) / norms / norms[:, None]).abs().max() < 2e-7


def test_collecting_goes_on_after_matrices_were_asked_for():
    net = Attention()
    x, y = torch.randint(-3, 4, (2, 5, 3)).float()
    grams = collected(GramMatrices(prune.select(net)), net, x)
    grams.matrix(net.q)
    collected(grams, net, y)
    for layer in (net.q, net.k, net.o):
        assert torch.equal(grams.matrix(layer), (gram_of(x) + gram_of(y)).float())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_a_convolution_has_one_of_each_group(groups, padding_mode):
    layer = nn.Conv2d(4, 6, (2, 3), 2, 1, 1, groups, padding_mode=padding_mode)
    images = torch.randint(-3, 4, (3, 4, 7, 8)).float()
    grams = collected(GramMatrices([(layer, "weight")]), layer, images)
    rows = unfolded(layer, images).view(-1, groups, 24 // groups)
    right = torch.stack([gram_of(rows[:, group]) for group in range(groups)]).float()
    assert torch.equal(grams.matrix(layer), right if groups > 1 else right[0])


def test_matrices_that_were_forgotten_or_not_stored_are_missed(tmp_path):
    net = Attention()
    grams = collected(GramMatrices(prune.select(net)), net, torch.ones(2, 3))
    grams.forget([(net.q, "weight")])
    assert torch.equal(grams.matrix(net.k), torch.full((3, 3), 2.0))
    with pytest.raises(RuntimeError, match=re.escape("q.weight: its Gram matrix was forgotten")):
        grams.matrix(net.q)
    grams.save(tmp_path / "grams")
    loaded = GramMatrices.load(tmp_path / "grams", prune.select(net))
    with pytest.raises(RuntimeError, match=r"q\.weight: its Gram matrix .* was never collected"):
        loaded.matrix(net.q)


def test_obs_is_the_error_that_removing_one_weight_leaves():
    """With all other weights of the row adjusted: the closed form against least squares."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 2), torch.randn(50, 4)
    grams = collected(GramMatrices([(layer, "weight")]), layer, x)
    scores = grams.obs(damping=1e-9)[layer, "weight"].terms[0][0].double()
    weight = layer.weight.detach().double()
    for row in range(2):
        for column in range(4):
            others = [j for j in range(4) if j != column]
            outputs = x.double() @ weight[row]
            fit = torch.linalg.lstsq(x.double()[:, others], outputs).solution
            error = (x.double()[:, others] @ fit - outputs).square().mean().sqrt()
            score = weight[row, column].abs() * scores[0, column]
            assert torch.isclose(score, error, rtol=1e-4)


def test_obs_needs_damping():
    layer = nn.Linear(2, 2)
    grams = GramMatrices([(layer, "weight")])
    with pytest.raises(ValueError, match="damping=0"):
        grams.obs(damping=0)


# Sums of |w| along rows and columns: exact to the grid, and the same however they are added.


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
    index = IndexMap(
        tuple(map(range, layout.shape)), values.stride(), 0, 0, tuple(range(values.ndim))
    )

    def add_up(communicator):
        first, last = (
            values.numel() * (communicator.index + more) // communicator.size for more in (0, 1)
        )
        part = Part("w", values.numel(), index, range(first, last), mask.view(-1))
        scored = Scored(part, ScoreSource(values.view(-1)))
        return magnitude_sums([(scored, index, layout)] * 2, communicator)

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
