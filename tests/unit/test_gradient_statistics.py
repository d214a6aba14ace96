"""Gradient statistics of one process: what is accepted, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

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


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_a_matrix_without_gradients_is_ranked_by_magnitude(value):
    """Times the typical score of its siblings, if one has gradients."""
    model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))})
    (seen, unseen), statistics = model["layers"], GradientStatistics(prune.select(model))
    with statistics.calibrating(), statistics.batch():
        (seen(torch.full((1, 3), value)) + unseen(torch.zeros(1, 3))).sum().backward()
    told = r"layers.1.weight \(1" if value else r"layers.0.weight, layers.1.weight \(2"
    with pytest.warns(UserWarning, match=f"all gradients are zero of {told} of 2 mat"):
        terms = [scores.terms[0] for scores in statistics.fisher().values()]
    assert all(torch.allclose(a * b, torch.full((2, 3), value or 0.5**0.5)) for a, b in terms)


def test_what_is_out_of_order_is_refused():
    """Other mistakes are those of every criterion of rank batches: test_rank_batches.py."""
    layer = nn.Linear(3, 2)
    statistics = GradientStatistics(named(layer))
    with statistics.calibrating():
        for call in (statistics.totals, statistics.fisher, partial(statistics.save, "none")):
            with pytest.raises(RuntimeError, match="have not added up what they saw yet"):
                call()
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


# The node that accumulates a gradient is made anew in each forward, as in a dense model.


SHAPE = (6, 4)


@pytest.fixture
def device(device):
    return torch.device("meta") if device.type == "cpu" else device


def pruned(device, make=lambda: nn.Linear(*SHAPE[::-1]), name="weight"):
    module = make()
    prune.l1_unstructured(module, name, amount=0.5)
    module.to(device)
    # A mask does not follow its parameter to the meta device, where it would lose its values.
    module._buffers[name + "_mask"] = getattr(module, name + "_mask").to(device)
    return module


def node_of(parameter):
    (function, _), *_ = parameter.expand_as(parameter).grad_fn.next_functions
    assert function.variable is parameter
    return function


def step(module, x):
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    out.sum().backward()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Linear(4, 6), "weight"),
        (lambda: nn.LSTM(4, 6), "weight_hh_l0"),  # keeps a list of its weights
    ],
)
def test_each_forward_has_a_node_of_its_own(make, name, device):
    module = pruned(device, make, name)
    x = torch.randn(3, 4, device=device)
    for _ in range(3):
        step(module, x)
        node_of(getattr(module, name + "_orig")).metadata["is old"] = True
        step(module, x)
        assert "is old" not in node_of(getattr(module, name + "_orig")).metadata


def test_the_weight_has_a_graph_after_forward_and_stays_when_the_product_fails(device):
    module = pruned(device)
    x = torch.randn(3, 4, device=device)
    module(x)
    before = module.weight
    assert before.requires_grad and before.grad_fn is not None
    mask, module.weight_mask = module.weight_mask, torch.ones(5, 7, device=device)
    with pytest.raises(RuntimeError, match="broadcast"):
        module(x)
    assert module.weight.shape == SHAPE and not module.weight.requires_grad
    assert before.requires_grad  # whoever holds it can still use its graph
    before.sum().backward()
    module.weight_mask = mask
    module(x)
    assert module.weight.requires_grad


def test_a_value_that_a_vmapped_forward_left_is_replaced(device):
    module = pruned(device)
    x = torch.randn(3, 4, device=device)
    stacked = {name: torch.stack([p, p]) for name, p in module.named_parameters()}
    vmap(lambda parameters: functional_call(module, parameters, (x,)))(stacked)
    step(module, x)
    assert module.weight.shape == SHAPE
