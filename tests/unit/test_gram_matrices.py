"""Gram matrices of one process: what is shared, experts, convolutions, errors."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import distprune as prune
from distprune.statistics import GramMatrices
from helpers.least_squares import gram_of


class Attention(nn.Module):
    """Two layers with one input, and a third that has it in some calls only."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, other=None):
        return self.q(x) + self.k(x) + self.o(x if other is None else other)


def test_layers_with_one_input_share_its_matrix():
    net, x = Attention(), torch.randn(5, 3)
    grams = GramMatrices(prune.select(net))
    with grams.collecting():
        net(x)
        net(2 * x)
    assert [labels for labels, _ in grams.blocks()] == [["q.weight", "k.weight", "o.weight"]]
    assert grams.num_bytes() == 3 * 4 * 9


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


def test_collecting_goes_on_after_matrices_were_asked_for():
    net = Attention()
    x, y = torch.randint(-3, 4, (2, 5, 3)).float()
    grams = GramMatrices(prune.select(net))
    with grams.collecting():
        net(x)
    grams.matrix(net.q)
    with grams.collecting():
        net(y)
    for layer in (net.q, net.k, net.o):
        assert torch.equal(grams.matrix(layer), (gram_of(x) + gram_of(y)).float())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
def test_a_convolution_has_one_of_each_group(groups, padding_mode):
    layer = nn.Conv2d(4, 6, (2, 3), 2, 1, 1, groups, padding_mode=padding_mode)
    images = torch.randint(-3, 4, (3, 4, 7, 8)).float()
    grams = GramMatrices([(layer, "weight")])
    with grams.collecting():
        layer(images)
    padded = images if padding_mode == "zeros" else functional.pad(images, (1, 1, 1, 1), "circular")
    padding = 1 if padding_mode == "zeros" else 0
    columns = functional.unfold(padded, layer.kernel_size, 1, padding, 2)
    rows = columns.transpose(1, 2).flatten(0, 1).view(-1, groups, 24 // groups)
    right = torch.stack([gram_of(rows[:, group]) for group in range(groups)]).float()
    assert torch.equal(grams.matrix(layer), right if groups > 1 else right[0])


def test_matrices_that_were_forgotten_or_not_stored_are_missed(tmp_path):
    net = Attention()
    grams = GramMatrices(prune.select(net))
    with grams.collecting():
        net(torch.ones(2, 3))
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
    grams = GramMatrices([(layer, "weight")])
    with grams.collecting():
        layer(x)
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
