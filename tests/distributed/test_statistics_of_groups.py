"""Ranks that hold different parameters (stages, experts), and errors of one rank."""

import os
import re
import tempfile

import pytest
import torch
import torch.distributed as dist
from test_statistics_on_wrappers import totals_of
from torch import Tensor, nn

import distprune as prune
from distprune.statistics import ActivationStatistics
from distprune.testing import run_ranks
from helpers.comparisons import assert_nothing_wrong, raised
from helpers.fused_experts import integer_net

NAMES = ["l1.weight", "l2.weight", "l3.weight"]


class Stage(nn.Module):
    """Some of the layers of an IntegerNet, under their names in the whole model."""

    def __init__(self, net: nn.Module, names: list[str]):
        super().__init__()
        for name in names:
            self.add_module(name, net.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.relu(layer(x))
        return x


def data_of(part: int) -> Tensor:
    generator = torch.Generator().manual_seed(part)
    return torch.randint(-1, 2, (3 + part, 6), generator=generator).float()


def collected(model: nn.Module, *data: Tensor, **options) -> ActivationStatistics:
    statistics = ActivationStatistics(prune.select(model), **options)
    with statistics.collecting():
        for x in data:
            model(x)
    return statistics


def facts_of(statistics: ActivationStatistics, **options) -> dict[str, dict]:
    """By parameter: sums, scores, outlier ratios, and the masks of a pruning."""
    facts = {"totals": totals_of(statistics)}
    for name in ("wanda", "ria", "stade"):
        scores = getattr(statistics, name)()
        facts[name] = {pair.fqn: factors.checksum() for pair, factors in scores.items()}
    facts["outliers"] = {pair.fqn: ratio for pair, ratio in statistics.outlier_ratios().items()}
    pairs, scores = list(statistics.totals()), statistics.wanda()
    prune.global_unstructured(pairs, prune.L1Unstructured, scores, amount=0.5, **options)
    facts["masks"] = {pair.fqn: pair[0].weight_mask.tolist() for pair in pairs}
    return facts


def wrong_on_stages(folder: str) -> list[str]:
    """Two stages, each on two data-parallel ranks: sums, scores, masks and file of one process."""
    stage_number, part = divmod(dist.get_rank(), 2)
    alone = dist.new_subgroups(1)[0]
    net, whole = (integer_net((6, 10, 5, 3), largest=2) for _ in range(2))
    stage = Stage(net, [["l1"], ["l2", "l3"]][stage_number])
    x = torch.relu(net.l1(data_of(part))) if stage_number else data_of(part)
    statistics = collected(stage, x, pipeline_parallel=True)
    path = os.path.join(folder, "statistics.safetensors")
    statistics.save(path)
    single = collected(whole, data_of(0), data_of(1), group=alone)
    loaded = ActivationStatistics.load(path, prune.select(whole), group=alone)
    wrong = [] if totals_of(loaded) == totals_of(single) else ["the file"]
    if set(statistics.num_tokens()) != set(NAMES):
        wrong.append(f"names {list(statistics.num_tokens())}")
    again = ActivationStatistics.load(path, prune.select(stage), pipeline_parallel=True)
    right = facts_of(single, group=alone)
    for what, mine in facts_of(again, pipeline_parallel=True).items():
        if not mine or mine != {name: right[what][name] for name in mine}:
            wrong.append(f"{what}: {mine}, not {right[what]}")
    return wrong


def test_pipeline_stages_have_the_statistics_of_the_whole_model():
    with tempfile.TemporaryDirectory() as folder:
        assert_nothing_wrong(run_ranks(wrong_on_stages, 4, folder))


class Layer(nn.Module):
    """A layer that all ranks have, and an expert that only the ranks of its group have."""

    def __init__(self, expert: int):
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(4, 4)
        self.experts = nn.ModuleDict({str(expert): nn.Linear(4, 4)})


def wrong_of_experts(is_joined_by_name: bool) -> list[str]:
    """Ranks 0 and 2 have expert 0, ranks 1 and 3 expert 1. Tokens come routed."""
    rank = dist.get_rank()
    expert = rank % 2
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = Layer(expert)
    mine = torch.full((rank + 1, 4), float(rank + 1))
    shared = ActivationStatistics(prune.select(model, include="shared"))
    pairs = prune.select(model, include="experts.*")
    if is_joined_by_name:
        experts = ActivationStatistics(pairs, pipeline_parallel=True)
    else:
        experts = ActivationStatistics(pairs, group=groups[expert])
    with shared.collecting(), experts.collecting():
        model.shared(mine)
        model.experts[str(expert)](mine)
    numbers = [r + 1 for r in range(4)]
    of_expert = [r + 1 for r in range(4) if r % 2 == expert]
    wrong = []
    for statistics, right in ((shared, numbers), (experts, of_expert)):
        (totals,) = statistics.totals().values()
        expected = (sum(right), [float(sum(n * n**2 for n in right))] * 4)
        if (totals.num_tokens, totals.squares.tolist()) != expected:
            wrong.append(f"{totals}, not {expected}")
    return wrong


@pytest.mark.parametrize("is_joined_by_name", [False, True])
def test_experts_are_summed_over_the_ranks_that_have_them(is_joined_by_name):
    assert_nothing_wrong(run_ranks(wrong_of_experts, 4, is_joined_by_name))


def errors_on_ranks(folder: str) -> list[str]:
    """What only one rank does wrong is an error on all, and nobody hangs."""
    rank = dist.get_rank()
    model = integer_net((6, 12, 5, 3))
    texts = []

    def attempt(step) -> None:
        texts.append(raised(step))

    attempt(lambda: ActivationStatistics(prune.select(model)[rank:]))
    bias = prune.select(model, names="bias", everything=True)
    attempt(lambda: ActivationStatistics(bias if rank else prune.select(model)))
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        if rank:
            model(torch.full((2, 6), float("nan")))
    attempt(statistics.wanda)
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        model(data_of(rank))
    path = os.path.join(folder if rank else os.devnull, "a.safetensors")
    attempt(lambda: statistics.save(path))
    attempt(
        lambda: statistics.totals(prune.select(model) if rank else [(nn.Linear(2, 2), "weight")])
    )
    alone = dist.new_subgroups(1)[0]
    with tempfile.TemporaryDirectory() as own:
        path = os.path.join(own, "a.safetensors")
        collected(model, data_of(rank), group=alone).save(path)
        attempt(lambda: ActivationStatistics.load(path, prune.select(model)))
    assert not any(module._forward_pre_hooks for module in model.modules())
    return texts


def test_an_error_on_one_rank_is_an_error_on_all():
    patterns = [
        "ranks were called with different arguments",
        "(bias|ranks).*",
        r"l1\.weight: the sum of its inputs is not finite",
        os.devnull,
        "none of the parameters",
        "ranks were called with different arguments.*statistics to load",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for texts in run_ranks(errors_on_ranks, 2, folder):
            assert len(texts) == len(patterns)
            for text, pattern in zip(texts, patterns, strict=True):
                assert re.search(pattern, text, re.DOTALL), (text, pattern)
        assert not os.listdir(folder)
