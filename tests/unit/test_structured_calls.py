"""global_structured of plain modules: its report, its warnings, and what it refuses by name."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from torch import nn

import distprune as prune
from distprune.methods.channels import normalized
from helpers.comparisons import changes, outcome, snapshot


@torch.no_grad()
def model_of(*sizes):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    for layer in layers:
        layer.weight.copy_(1 + torch.arange(layer.weight.numel()).view(layer.weight.shape))
    return nn.Sequential(*layers)


def part(layer, dim, *args, name="weight", **kwargs):
    return prune.ChannelPart((layer, name), dim, *args, **kwargs)


def test_the_report_counts_channels_and_what_could_be_removed():
    model = model_of(3, 4, 2)
    parts = [part(model[0], 0), part(model[0], 0, name="bias", is_ranked=False), part(model[1], 1)]
    prune.global_structured({"neurons": parts}, amount=1)
    report = prune.global_structured({"neurons": parts}, amount=0.5)  # half of three: two, to even
    (entry,) = report.groups
    assert (entry.num_channels, entry.num_pruned_before, entry.num_pruned_now) == (4, 1, 2)
    assert entry.channel_size == 3 + 1 + 2
    assert report.num_removable == report.num_pruned == 18 and entry.num_pruned == 3
    assert model[0].weight_mask.sum(1).tolist() == [0, 0, 0, 3]
    assert model[1].weight_mask.tolist() == [[0, 0, 0, 1]] * 2
    assert report.threshold == pytest.approx((7**2 + 8**2 + 9**2 + 3**2 + 7**2) ** 0.5, rel=1e-12)
    assert report.to_dict()["groups"][0]["num_pruned_now"] == 2
    text = str(report)
    assert "neurons" in text and "75.00%" in text and "18" in text and "removable" in text


def test_the_call_works_with_one_output_and_one_channel():
    model = model_of(1, 1)
    report = prune.global_structured({"a": [part(model[0], 0)]}, amount=1)
    assert report.groups[0].name == "a" and report.sparsity == 1.0


@pytest.mark.parametrize("normalize", ["rms", "l2", "mean"])
def test_scores_are_divided_by_the_statistic_of_live_channels(normalize):
    (a, b) = (25.0, 2) if normalize != "mean" else (7.0, 2)
    statistic = {"rms": math.sqrt(a / b), "l2": math.sqrt(a), "mean": a / b}[normalize]
    scores, live = np.array([3.0, 100.0, 4.0]), np.array([True, False, True])
    divided = normalized(scores, live, normalize)
    assert divided[[0, 2]].tolist() == [3.0 / statistic, 4.0 / statistic] and scores[0] == 3.0
    both = np.array([True, True])
    zeros = normalized(np.zeros(2), both, normalize)
    assert zeros.tolist() == [0.0, 0.0]  # nothing to divide by
    of_large = {"rms": math.sqrt(2.5), "l2": math.sqrt(5), "mean": 1.5}[normalize]
    large = normalized(np.array([1e300, 2e300]), both, normalize)
    assert large.tolist() == pytest.approx([1 / of_large, 2 / of_large], rel=1e-15)


def call(change):
    """A valid call, with one change; returns the model and the call."""
    model = model_of(4, 6, 4)
    parts = [part(model[0], 0), part(model[1], 1)]
    arguments = {"groups": {"g": parts}, "amount": 0.5}
    change(arguments, model)
    return model, arguments


def with_groups(make):
    return lambda arguments, model: arguments.update(groups=make(model))


def scores_for(*layers):
    return lambda arguments, model: arguments.update(
        importance_scores={(model[i], "weight"): torch.ones(model[i].weight.shape) for i in layers}
    )


REFUSED = {
    "two groups": (
        with_groups(lambda m: {"a": [part(m[0], 0)], "b": [part(m[0], 1)]}),
        ValueError, "Linear.weight is in the groups a and b",
    ),
    "two parts": (
        with_groups(lambda m: {"a": [part(m[0], 0), part(m[0], 1)]}),
        ValueError, "Linear.weight is in the groups a and a",
    ),
    "counts": (
        with_groups(lambda m: {"a": [part(m[0], 0), part(m[1], 0)]}),
        ValueError, r"group a have different numbers of channels: 6 of .*4 of .*expected the same",
    ),
    "heads": (
        with_groups(lambda m: {"a": [part(m[0], 0, 4)]}),
        ValueError, "6 indices along dim 0; expected a multiple of size=4",
    ),
    "dim": (with_groups(lambda m: {"a": [part(m[0], 2)]}), IndexError, "out of range"),
    "no parameter": (
        with_groups(lambda m: {"a": [part(m[0], 0, name="wait")]}), AttributeError, "wait",
    ),
    "no groups": (with_groups(lambda m: {}), ValueError, "parameters is empty"),
    "no part": (with_groups(lambda m: {"a": []}), ValueError, "a has no part that is ranked"),
    "a list": (with_groups(lambda m: []), TypeError, "groups is a list"),
    "n": (lambda a, m: a.update(n=2.5), ValueError, "n=2.5"),
    "amount": (lambda a, m: a.update(amount=7), ValueError, "amount=7"),
    "share": (lambda a, m: a.update(amount=1.5), ValueError, "amount=1.5"),
    "normalize": (lambda a, m: a.update(normalize="max"), ValueError, "normalize='max'"),
    "some scores": (scores_for(0), ValueError, "scores of some parameters of group g"),
    "scores of types": (
        lambda a, m: a.update(importance_scores=[1]), TypeError, "importance_scores is a list",
    ),
    "infinite": (
        lambda a, m: a.update(normalize="rms", importance_scores={
            (layer, "weight"): torch.full(layer.weight.shape, torch.inf) for layer in m
        }),
        ValueError, "g, channels 0, 1, 2, 3, 4 are inf;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_mistakes_are_named_and_change_nothing(what):
    change, kind, text = REFUSED[what]
    model, arguments = call(change)
    before = snapshot(model)
    with pytest.raises(kind, match=text):
        prune.global_structured(arguments.pop("groups"), **arguments)
    assert changes(before, snapshot(model)) == []


def test_parts_are_checked_when_they_are_made():
    with pytest.raises(ValueError, match="size=0"):
        part(nn.Linear(1, 1), 0, size=0)


def test_infinite_norms_tie_without_normalize():
    model = model_of(2, 4)
    scores = {(model[0], "weight"): torch.full((4, 2), torch.inf)}
    groups = {"a": [part(model[0], 0)]}
    report = prune.global_structured(groups, amount=3, importance_scores=scores)
    assert (report.num_ties, report.num_ties_pruned) == (4, 3)
    assert model[0].weight_mask.sum(1).tolist() == [0, 0, 0, 2]


def test_pruned_nan_and_scores_of_unranked_parts_do_not_count():
    model = model_of(2, 3, 2)
    mask = torch.ones(3, 2)
    mask[1, 0] = 0
    prune.custom_from_mask(model[0], "weight", mask)
    with torch.no_grad():
        model[0].weight_orig[1, 0] = torch.nan
    bias = prune.ChannelPart((model[0], "bias"), 0, is_ranked=False)
    prune.global_structured({"a": [part(model[0], 0), bias]}, amount=1)
    assert model[0].weight_mask.sum(1).tolist() == [0, 1, 2]


def outputs(layer, *others):
    """The parts of some outputs: the weight of a layer, and what has no part in the ranking."""
    rest = [part(each, 0, name=name, is_ranked=False) for each, name in others]
    return [part(layer, 0), *rest]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_masked_channels_are_taken_out(dims):
    convolution = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1]
    norm = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dims - 1]
    first, norm, second, last = (
        convolution(2, 8, 2), norm(8), convolution(8, 6, 2), nn.Linear(6 * 2**dims, 3),
    )  # fmt: skip
    model = nn.Sequential(first, norm, nn.ReLU(), second, nn.Flatten(), last)
    example = torch.randn(5, 2, *[4] * dims)
    model(example)  # running statistics
    model.eval()
    between = {"a": [*outputs(first, (norm, "weight"), (norm, "bias")), part(second, 1)]}
    after = {"b": [*outputs(second, (second, "bias")), part(last, 1, 2**dims)]}
    prune.l1_unstructured(first, "weight", 3)
    prune.global_structured(between, amount=3)
    prune.global_structured(after, amount=2)
    wanted, keep = model(example), norm.weight_mask == 1
    biases = first.bias[keep], norm.running_var[keep]
    removed = prune.shrink_channels({**between, **after}, lambda: model(example))
    assert removed["a"] == (~keep).nonzero().view(-1).tolist() and len(removed["b"]) == 2
    assert torch.allclose(model(example), wanted, atol=1e-6)
    assert (first.out_channels, norm.num_features, second.in_channels) == (5, 5, 5)
    assert (second.out_channels, last.in_features, last.out_features) == (4, 4 * 2**dims, 3)
    assert all(map(torch.equal, biases, (first.bias, norm.running_var)))
    assert not prune.is_pruned(model)
    plain = nn.Sequential(
        convolution(2, 5, 2), type(norm)(5), nn.ReLU(), convolution(5, 4, 2), nn.Flatten(),
        nn.Linear(4 * 2**dims, 3),
    )  # fmt: skip
    plain.load_state_dict(model.state_dict())
    model(example).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Connected(nn.Module):
    """Two linear layers whose channels another one has, too."""

    def __init__(self, other):
        super().__init__()
        self.first, self.second, self.other = nn.Linear(3, 4), nn.Linear(4, 3), other

    def forward(self, x):
        hidden = self.first(x)
        hidden = hidden + self.other(x) if self.other.weight.ndim == 2 else self.other(hidden)
        return self.second(hidden)


def neurons(model):
    return [part(model.first, 0), part(model.second, 1)]


@pytest.mark.parametrize(
    ("other", "more", "amount", "kind", "text"),
    [
        (nn.Linear(3, 4), (), 1, "NotImplementedError", "group a: without .* another result"),
        (nn.LayerNorm(4), (), 1, "NotImplementedError", "group a: without .*normalized_shape"),
        (nn.LayerNorm(4), (0,), 1, "NotImplementedError", "weight .dim 0 of a LayerNorm"),
        (nn.Linear(3, 4), (0,), 4, "ValueError", r"parts of \[4, 4, 4\] channels"),
        (nn.Linear(3, 4), None, 1, "NotImplementedError", "Linear.weight .*is not masked"),
    ],
)
def test_what_is_connected_otherwise_stays(other, more, amount, kind, text):
    model, x = Connected(other).eval(), torch.randn(5, 3)
    parts = [*neurons(model), *(part(other, dim, is_ranked=False) for dim in more or ())]
    prune.global_structured({"a": parts}, amount=amount)
    parts += [part(other, 0)] * (more is None)
    model(x)
    found = outcome(model, lambda: prune.shrink_channels({"a": parts}, lambda: model(x)))
    assert found[0] == kind and re.search(text, found[1], re.DOTALL), found
    assert found[2] == []
