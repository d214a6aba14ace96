"""global_structured of plain modules: its report, its warnings, and what it refuses by name."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import distprune as prune
from distprune.methods.channels import normalized
from helpers.comparisons import changes, snapshot


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
