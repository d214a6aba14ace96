"""Gradient statistics of one process: what is accepted, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.statistics import GradientStatistics, gradients


def named(module: nn.Module) -> list[prune.NamedParameter]:
    return [prune.NamedParameter(module, "weight", "layer.weight")]


def test_vectors_are_refused():
    with pytest.raises(NotImplementedError, match=r"layer.weight: it has 1 dimension\(s\)"):
        GradientStatistics(named(nn.LayerNorm(3)))


@pytest.mark.parametrize(
    ("shape", "chunk"), [((3, 5, 7), 8), ((3, 5, 7), 1 << 17), ((1, 40, 3), 8)]
)
def test_squares_in_chunks(monkeypatch, shape, chunk):
    monkeypatch.setattr("distprune.statistics.parameters._CPU_CHUNK", chunk)
    matrices = torch.randint(-9, 10, shape).to(torch.bfloat16)
    squares = matrices.double() ** 2
    along, across = gradients.squares_along(matrices)
    assert along.equal(squares.sum(2)) and across.equal(squares.sum(1))


def test_a_matrix_without_gradients_is_ranked_by_magnitude():
    layer = nn.Linear(3, 2)
    statistics = GradientStatistics(named(layer))
    with statistics.calibrating(), statistics.batch():
        (layer(torch.zeros(1, 3)) * 0).sum().backward()
    with pytest.warns(UserWarning, match=r"all gradients are zero of layer.weight \(1 of 1 mat"):
        (scores,) = statistics.fisher().values()
    assert all(bool((factor == factor.max()).all() and factor.all()) for factor in scores.terms[0])


def test_what_is_out_of_order_is_refused():
    layer = nn.Linear(3, 2)
    statistics = GradientStatistics(named(layer))
    with (
        pytest.raises(RuntimeError, match="batch\\(\\) outside of calibrating"),
        statistics.batch(),
    ):
        pass
    with statistics.calibrating():
        with pytest.raises(RuntimeError, match="inside of calibrating"), statistics.calibrating():
            pass
        for call in (statistics.totals, statistics.fisher, partial(statistics.save, "none")):
            with pytest.raises(RuntimeError, match="have not added up what they saw yet"):
                call()
        with pytest.raises(ValueError, match="loss_scale=0"), statistics.batch(loss_scale=0):
            pass
        with pytest.raises(ValueError, match="weight=-1"), statistics.batch(-1):
            pass
    assert not layer.weight._backward_hooks
    layer.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="is frozen"), statistics.calibrating():
        pass


def test_a_pruned_parameter_counts_what_is_left():
    layer = nn.Linear(3, 2)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    prune.custom_from_mask(layer, "weight", mask)
    statistics = GradientStatistics(named(layer))
    x = torch.tensor([[1.0, 2.0, 3.0]])
    with statistics.calibrating(), statistics.batch(2.0):
        layer(x).sum().backward()
    (held,) = statistics.totals().values()
    squares = 2 * (mask * x).double() ** 2
    assert held.by_output.equal(squares.sum(1)) and held.by_input.equal(squares.sum(0))
