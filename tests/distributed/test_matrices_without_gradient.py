"""Scores of matrices that no gradient reached, such as experts without tokens."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distprune as prune
from distprune import criteria
from distprune.testing import run_ranks

# By name: the matrices that get no gradient; of fused experts, by number.
EMPTY = {"experts.1.weight": [0], "fused.weight": [0, 3], "zero.weight": []}
KINDS = {
    "SNIP": lambda pairs: criteria.SNIP(pairs),
    "Taylor": lambda pairs: criteria.Taylor(pairs, unit="global_batch", power=1),
    "Fisher": lambda pairs: criteria.Fisher(pairs, unit="global_batch"),
}


class Weight(nn.Module):
    """A weight whose gradient is a given tensor."""

    def __init__(self, shape, empty):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        gradient = torch.randn(shape)
        for number in empty:
            gradient[number if len(shape) == 3 else slice(None)] = 0
        self.register_buffer("gradient", gradient)

    def forward(self):
        return (self.weight * self.gradient).sum()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        empty = lambda name: EMPTY.get(f"{name}.weight", [])  # noqa: E731
        experts = [Weight((6, 4), empty(f"experts.{n}")) for n in range(3)]
        self.moe = nn.ModuleDict({"experts": nn.ModuleList(experts)})
        self.moe["fused"] = Weight((5, 3, 4), empty("fused"))
        self.moe["conv"] = nn.Conv1d(2, 3, 2, bias=False)  # no stack of matrices
        self.moe["zero"] = Weight((3, 3), [])
        self.moe["zero"].weight.data.zero_()  # nothing to rank

    def forward(self):
        weights = [*self.moe["experts"], self.moe["fused"], self.moe["zero"]]
        return sum(each() for each in weights) + self.moe["conv"].weight[1:].sum()


def expected_scores(kind, model):
    """By name, from whole weights and gradients."""
    model().backward()
    scores, magnitudes = {}, {}
    for name, p in model.named_parameters():
        product = (p * p.grad).detach()
        scores[name] = product.square() / 2 if kind == "Fisher" else product.abs()
        magnitudes[name] = p.detach().abs()
    experts = [f"moe.experts.{n}.weight" for n in range(3)]
    stacks = [[(scores[n], magnitudes[n]) for n in experts]]
    stacks += [list(zip(scores["moe.fused.weight"], magnitudes["moe.fused.weight"], strict=True))]
    for matrices in stacks:
        seen = [float(s.sum() / m.sum()) for s, m in matrices if s.any()]
        assert 0 < len(seen) < len(matrices)
        for score, magnitude in matrices:
            if not score.any():
                score.copy_(magnitude * (sum(seen) / len(seen)))
    assert not scores["moe.conv.weight"][0].any() and not scores["moe.zero.weight"].any()
    return scores


def wrapped(wrapping):
    model = Net()
    if wrapping == "ddp":
        return DistributedDataParallel(model)
    if wrapping == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return fully_shard(model) if wrapping == "fsdp2" else model


def wrong_scores(wrapping, kind):
    expected, model = expected_scores(kind, Net()), wrapped(wrapping)
    pairs = prune.select(model, include="*")
    criterion = KINDS[kind](pairs)
    model().backward()
    criterion.update()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scores = criterion.scores()
    wrong = [str(w.message) for w in caught if "all gradients are zero of" not in str(w.message)]
    if len(caught) != (not dist.is_initialized() or dist.get_rank() == 0):
        wrong.append(f"{len(caught)} warnings")
    for part in criterion._parts():
        found = scores[part.pair]
        local = found.to_local() if hasattr(found, "to_local") else found
        try:
            own = part.shard.slice_of(expected[part.label])
            torch.testing.assert_close(local, own, rtol=1e-6, atol=1e-9)
        except AssertionError as error:
            wrong.append(f"{part.label}: {error}")
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_scored_by_magnitude_times_what_their_siblings_score(kind):
    assert wrong_scores("plain", kind) == []


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp1", "fsdp2"])
def test_of_shards_too(wrapping):
    assert run_ranks(wrong_scores, 3, wrapping, "Taylor") == [[]] * 3


def test_the_warning_names_them_and_gradients_alone_are_not_filled():
    model = Net()
    pairs = prune.select(model, include="*")
    taylor, magnitude = KINDS["Taylor"](pairs), criteria.GradientMagnitude(pairs)
    model().backward()
    for criterion in (taylor, magnitude):
        criterion.update()
    text = r"zero of moe\.experts\.1\.weight, moe\.fused\.weight \(experts 0, 3\) \(3 of 10 matri"
    with pytest.warns(UserWarning, match=text):
        taylor.scores()
    assert not any(s.any() for pair, s in magnitude.scores().items() if "s.1" in pair.fqn)
