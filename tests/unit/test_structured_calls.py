"""global_structured of plain modules: its report, its warnings, and what it refuses by name."""

import itertools
import json

import pytest
import torch
from torch import nn

import distprune as prune
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
    group = prune.ChannelGroup(
        [part(model[0], 0), part(model[0], 0, name="bias", is_ranked=False), part(model[1], 1)],
        "neurons",
    )
    prune.global_structured([group], amount=1)
    report = prune.global_structured([group], amount=0.5)  # half of three: two, to even
    (entry,) = report.groups
    assert (entry.num_channels, entry.num_pruned_before, entry.num_pruned_now) == (4, 1, 2)
    assert entry.channel_size == 3 + 1 + 2
    assert report.num_removable == entry.num_removable == report.num_pruned == 18
    assert (report.num_channels, report.num_channels_pruned) == (4, 3)
    assert report.num_channels_pruned_now == 2
    assert model[0].weight_mask.sum(1).tolist() == [0, 0, 0, 3]
    assert model[1].weight_mask.tolist() == [[0, 0, 0, 1]] * 2
    assert report.threshold == pytest.approx((7**2 + 8**2 + 9**2 + 3**2 + 7**2) ** 0.5, rel=1e-12)
    data = json.loads(report.to_json())
    assert data["groups"][0]["num_removable"] == 18 and data["num_channels_pruned"] == 3
    text = str(report)
    assert "neurons" in text and "75.00%" in text and "18" in text and "could be removed" in text


def test_the_call_works_with_one_output_and_one_channel():
    model = model_of(1, 1)
    report = prune.global_structured([prune.ChannelGroup([part(model[0], 0)])], amount=1)
    assert report.groups[0].name == "Linear.weight" and report.sparsity == 1.0


def test_an_emptied_group_is_warned_of_unless_it_was_asked_for():
    def groups():
        model = model_of(2, 3, 8)
        with torch.no_grad():
            model[1].weight.add_(100)
        return [
            prune.ChannelGroup([part(model[0], 0)], "small"),
            prune.ChannelGroup([part(model[1], 0)], "large"),
        ]

    with pytest.warns(UserWarning, match="small.*normalize"):
        assert prune.global_structured(groups(), amount=3).collapsed == ("small",)
    report = prune.global_structured(groups(), amount=3, min_sparsity={"small": 1.0})
    assert report.collapsed == ()
    report = prune.global_structured(groups(), amount=4, normalize="rms")
    assert all(0 < group.sparsity < 1 for group in report.groups)


def call(change):
    """A valid call, with one change; returns the model and the call."""
    model = model_of(4, 6, 4)
    parts = [part(model[0], 0), part(model[1], 1)]
    arguments = {"groups": [prune.ChannelGroup(parts, "g")], "amount": 0.5}
    change(arguments, model)
    return model, arguments


def with_groups(make):
    return lambda arguments, model: arguments.update(groups=make(model))


def scores_for(*layers):
    return lambda arguments, model: arguments.update(
        importance_scores={(model[i], "weight"): torch.ones(model[i].weight.shape) for i in layers}
    )


Group = prune.ChannelGroup
REFUSED = {
    "two groups": (
        with_groups(lambda m: [Group([part(m[0], 0)], "a"), Group([part(m[0], 1)], "b")]),
        ValueError, "Linear.weight is in the groups a and b",
    ),
    "two parts": (
        with_groups(lambda m: [Group([part(m[0], 0), part(m[0], 1)], "a")]),
        ValueError, "Linear.weight is in the groups a and a",
    ),
    "names": (
        with_groups(lambda m: [Group([part(m[0], 0)], "a"), Group([part(m[1], 0)], "a")]),
        ValueError, "two groups have one name",
    ),
    "counts": (
        with_groups(lambda m: [Group([part(m[0], 0), part(m[1], 0)], "a")]),
        ValueError, r"group a have different numbers of channels: 6 of .*4 of .*expected the same",
    ),
    "heads": (
        with_groups(lambda m: [Group([part(m[0], 0, 4)], "a")]),
        ValueError, "6 indices along dim 0; expected a multiple of size=4",
    ),
    "dim": (with_groups(lambda m: [Group([part(m[0], 2)])]), IndexError, "out of range"),
    "no parameter": (
        with_groups(lambda m: [Group([part(m[0], 0, name="wait")])]), AttributeError, "wait",
    ),
    "no groups": (with_groups(lambda m: []), ValueError, "parameters is empty"),
    "n": (lambda a, m: a.update(n="nuc"), TypeError, "n='nuc'"),
    "unit": (lambda a, m: a.update(unit="heads"), ValueError, "unit='heads'"),
    "amount": (lambda a, m: a.update(amount=7), ValueError, "amount=7"),
    "share": (lambda a, m: a.update(amount=1.5), ValueError, "amount=1.5"),
    "normalize": (lambda a, m: a.update(normalize="max"), ValueError, "normalize='max'"),
    "floor": (lambda a, m: a.update(min_sparsity=0.9), ValueError, "min_sparsity needs at least 6"),
    "ceiling": (lambda a, m: a.update(max_sparsity=0.1), ValueError, "at most 0"),
    "bound of none": (lambda a, m: a.update(max_sparsity={"h": 0.1}), ValueError, "'h'"),
    "some scores": (scores_for(0), ValueError, "scores of some parameters of group g"),
    "scores of types": (
        lambda a, m: a.update(importance_scores=[1]), TypeError, "importance_scores is a list",
    ),
    "integers": (
        lambda a, m: a.update(importance_scores={
            (layer, "weight"): torch.ones(layer.weight.shape, dtype=torch.int64) for layer in m
        }),
        NotImplementedError, "int64",
    ),
    "infinite": (
        lambda a, m: a.update(normalize="rms", importance_scores={
            (layer, "weight"): torch.full(layer.weight.shape, torch.inf) for layer in m
        }),
        ValueError, "g, channels 0, 1, 2, 3, 4 are infinite",
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


def test_groups_are_checked_when_they_are_made():
    with pytest.raises(ValueError, match="size=0"):
        part(nn.Linear(1, 1), 0, size=0)
    with pytest.raises(ValueError, match="no part that is ranked"):
        Group([])


def test_infinite_norms_tie_without_normalize():
    model = model_of(2, 4)
    scores = {(model[0], "weight"): torch.full((4, 2), torch.inf)}
    group = prune.ChannelGroup([part(model[0], 0)])
    report = prune.global_structured([group], amount=3, importance_scores=scores)
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
    group = prune.ChannelGroup([part(model[0], 0), bias])
    prune.global_structured([group], amount=1)
    assert model[0].weight_mask.sum(1).tolist() == [0, 1, 2]
