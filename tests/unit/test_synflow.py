"""SynFlow on one process: beside the authors' algorithm, and what its theorem says."""

import math

import pytest
import torch
from torch import nn

import distprune as prune
from distprune import criteria
from helpers import criterion_references as references

NAMES = ["0.weight", "3.weight", "5.weight"]


def perceptron(*, norm=True, dtype=torch.float64):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if norm else nn.Identity()
    model = nn.Sequential(
        nn.Linear(8, 16), middle, nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    if norm:  # as after some training
        nn.init.normal_(model[1].running_mean)
        nn.init.normal_(model[1].weight)
    return model.to(dtype)


def pairs_of(model):
    return [(model.get_submodule(name.split(".")[0]), "weight") for name in NAMES]


def forward_of(model):
    ones = torch.ones(1, model[0].in_features, dtype=model[0].bias.dtype)
    return lambda: model(ones)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_are_those_of_the_paper(norm, dtype):
    model = perceptron(norm=norm, dtype=dtype)
    ones = torch.ones(1, 8, dtype=dtype)
    expected = references.synflow(model, NAMES, ones, {})
    criterion = criteria.SynFlow(pairs_of(model), model=model)
    criterion.measure(forward_of(model))
    scores = list(criterion.scores().values())
    if dtype is torch.float64:
        # Divided by a power of two, all of them by the same one.
        factor = float(expected[NAMES[0]].max() / scores[0].max())
        factor = 2.0 ** round(math.log2(factor))
        assert all(score.dtype is torch.float32 for score in scores)
        for score, name in zip(scores, NAMES, strict=True):
            assert torch.allclose(score.double() * factor, expected[name], rtol=1e-6, atol=0)
        return
    for score, name in zip(scores, NAMES, strict=True):
        assert torch.equal(score, expected[name])


def test_scores_of_float64_that_float32_could_not_hold():
    model = perceptron(norm=False)
    with torch.no_grad():
        model[3].weight.mul_(1e60)
    criterion = criteria.SynFlow(pairs_of(model), model=model)
    criterion.measure(forward_of(model))
    for score in criterion.scores().values():
        assert score.isfinite().all() and score.max() > 0


@pytest.mark.parametrize("sparsity, rounds", [(0.9, 10), (0.5, 1), (1.0, 3), (0.0, 2)])
def test_masks_are_those_of_the_algorithm(sparsity, rounds):
    model = perceptron()
    expected = references.synflow_masks(
        model, NAMES, torch.ones(1, 8, dtype=torch.float64), sparsity, rounds
    )
    report = criteria.SynFlow(pairs_of(model), model=model).prune(
        forward_of(model), sparsity, rounds=rounds
    )
    for (module, _), name in zip(pairs_of(model), NAMES, strict=True):
        assert torch.equal(module.weight_mask, expected[name])
    total = sum(mask.numel() for mask in expected.values())
    assert report.num_pruned == report.num_pruned_now == report.amount == round(sparsity * total)
    assert (report.num_pruned_before, report.num_elements) == (0, total)


def unbalanced():
    """Without biases, as the theorem has it; the middle layer has by far the smallest weights."""
    model = perceptron(norm=False)
    for name, parameter in model.named_parameters():
        nn.init.zeros_(parameter) if name.endswith("bias") else None
    with torch.no_grad():
        model[3].weight.mul_(1e-3)
    return model


def test_no_layer_collapses_before_all_could():
    """2006.05467, theorem 3; magnitude empties the layer with the smallest weights."""
    model = unbalanced()
    sparsity = 1 - 40 / sum(model.get_parameter(name).numel() for name in NAMES)
    criteria.SynFlow(pairs_of(model), model=model).prune(forward_of(model), sparsity)
    assert all(int(module.weight_mask.sum()) > 0 for module, _ in pairs_of(model))
    other = unbalanced()
    prune.global_unstructured(pairs_of(other), prune.L1Unstructured, amount=sparsity)
    assert int(other[3].weight_mask.sum()) == 0


def test_rounds_go_on_from_masks_that_are_there():
    model = perceptron()
    criterion = criteria.SynFlow(pairs_of(model), model=model)
    first = criterion.prune(forward_of(model), 0.5, rounds=3)
    masks = [module.weight_mask.clone() for module, _ in pairs_of(model)]
    second = criterion.prune(forward_of(model), 0.75, rounds=4)
    assert second.num_pruned_before == first.num_pruned == round(0.5 * second.num_elements)
    assert second.num_pruned == round(0.75 * second.num_elements)
    for (module, _), mask in zip(pairs_of(model), masks, strict=True):
        assert torch.all(module.weight_mask[mask == 0] == 0)
    third = criterion.prune(forward_of(model), 0.1, rounds=4)
    assert (third.num_pruned_now, third.num_pruned) == (0, second.num_pruned)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(fails):
    model = perceptron()
    model[3].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    criterion = criteria.SynFlow(pairs_of(model), model=model)
    if fails:
        with pytest.raises(TypeError, match="forward returned a tuple; expected the output"):
            criterion.measure(lambda: (forward_of(model)(),))
    else:
        criterion.measure(forward_of(model))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
        if value.is_floating_point():
            assert torch.equal(value.signbit(), state[name].signbit())
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_overflow_is_named():
    model = perceptron(norm=False, dtype=torch.float32)
    with torch.no_grad():
        model[3].weight.mul_(1e38)
    criterion = criteria.SynFlow(pairs_of(model), model=model)
    with pytest.raises(ValueError, match=r"Linear.weight \(#2\) .* overflows where all weights"):
        criterion.prune(forward_of(model), 0.5)
    assert not prune.is_pruned(model)
    model.double()
    criteria.SynFlow(pairs_of(model), model=model).prune(
        lambda: model(torch.ones(1, 8, dtype=torch.float64)), 0.5, rounds=2
    )


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, float("nan")])
def test_sparsity_out_of_range(sparsity):
    model = perceptron()
    with pytest.raises(ValueError, match="sparsity="):
        criteria.SynFlow(pairs_of(model), model=model).prune(forward_of(model), sparsity)


@pytest.mark.parametrize("rounds", [0, -1, 1.5, True])
def test_rounds_out_of_range(rounds):
    model = perceptron()
    with pytest.raises(ValueError, match="rounds="):
        criteria.SynFlow(pairs_of(model), model=model).prune(forward_of(model), 0.5, rounds=rounds)
