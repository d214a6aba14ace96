"""Ranks that hold different parameters (stages, experts), files that any sharding reads, errors."""

import copy
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distprune as prune
from distprune.statistics import ActivationStatistics
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.integer_nets import integer_net

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


def whole_statistics(net: nn.Module, data: list[Tensor], group) -> ActivationStatistics:
    statistics = ActivationStatistics(prune.select(net), group=group)
    with statistics.collecting():
        for x in data:
            net(x)
    return statistics


def wrong_totals(found: dict, expected: dict) -> list[str]:
    by_name = {pair.fqn: totals for pair, totals in expected.items()}
    wrong = []
    for pair, mine in found.items():
        right = by_name[pair.fqn]
        is_equal = torch.equal(mine.sums, right.sums) and torch.equal(mine.squares, right.squares)
        if mine.num_tokens != right.num_tokens or not is_equal:
            wrong.append(f"{pair.fqn}: {mine}, not {right}")
    return wrong


def wrong_on_stages(folder: str) -> list[str]:
    """Two stages, each on two data-parallel ranks: sums, scores, masks and file of one process."""
    rank = dist.get_rank()
    alone = dist.new_subgroups(1)[0]
    stage_number, part = rank // 2, rank % 2
    net = integer_net((6, 10, 5, 3), largest=2)
    reference_net = copy.deepcopy(net)
    stage = Stage(copy.deepcopy(net), [["l1"], ["l2", "l3"]][stage_number])
    parameters = prune.select(stage)
    statistics = ActivationStatistics(parameters, pipeline_parallel=True)
    with torch.no_grad():
        x = data_of(part)
        x = torch.relu(net.l1(x)) if stage_number else x
    with statistics.collecting():
        stage(x)
    single = whole_statistics(reference_net, [data_of(0), data_of(1)], alone)
    wrong = wrong_totals(statistics.totals(), single.totals())
    if set(statistics.num_tokens()) != set(NAMES):
        wrong.append(f"names {list(statistics.num_tokens())}")
    path = os.path.join(folder, "statistics.safetensors")
    statistics.save(path)
    loaded = ActivationStatistics.load(path, prune.select(reference_net), group=alone)
    wrong += wrong_totals(loaded.totals(), single.totals())
    again = ActivationStatistics.load(path, parameters, pipeline_parallel=True)
    for name in ("wanda", "ria", "stade"):
        scores, right = getattr(again, name)(), getattr(single, name)()
        for pair, factored in scores.items():
            other = next(value for key, value in right.items() if key.fqn == pair.fqn)
            if factored.checksum() != other.checksum():
                wrong.append(f"{name} of {pair.fqn}: {factored}, not {other}")
    ratios = {pair.fqn: ratio for pair, ratio in again.outlier_ratios().items()}
    of_single = {pair.fqn: ratio for pair, ratio in single.outlier_ratios().items()}
    if ratios != {name: of_single[name] for name in ratios} or not ratios:
        wrong.append(f"{ratios}, not {of_single}")
    prune.global_unstructured(
        parameters, prune.L1Unstructured, statistics.wanda(), amount=0.5, pipeline_parallel=True
    )
    factors = single.wanda()
    scores = [
        pair[0].weight.detach().abs() * factors[pair].terms[0][0]
        for pair in prune.select(reference_net)
    ]
    keeps = dict(zip(NAMES, reference.prune(scores, 0.5), strict=True))
    for pair in parameters:
        if not torch.equal(pair[0].weight_mask.bool(), keeps[pair.fqn]):
            wrong.append(f"mask of {pair.fqn}")
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


def saved(wrapping: str, path: str) -> None:
    sizes = (6, 12, 5, 3)
    model = wrappings.wrap(integer_net(sizes), wrapping)
    part, _ = wrappings.data_rank(wrapping)
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        model(data_of(part))
    statistics.save(path)


def wrong_after_loading(wrapping: str, path: str, num_parts: int) -> list[str]:
    sizes = (6, 12, 5, 3)
    model = wrappings.wrap(integer_net(sizes), wrapping)
    parameters = prune.select(model)
    loaded = ActivationStatistics.load(path, parameters)
    alone = dist.new_subgroups(1)[0]
    data = [data_of(part) for part in range(num_parts)]
    wrong = wrong_totals(
        loaded.totals(), whole_statistics(integer_net(sizes), data, alone).totals()
    )
    if loaded.mode != "one_pass":
        wrong.append(str(loaded.mode))
    # More data, on top of what was loaded.
    part, num_more = wrappings.data_rank(wrapping)
    with loaded.collecting():
        model(data_of(10 + part))
    data += [data_of(10 + part) for part in range(num_more)]
    single = whole_statistics(integer_net(sizes), data, alone)
    return wrong + wrong_totals(loaded.totals(), single.totals())


PAIRS = [("fsdp2-3", "tp-2", 3), ("tp-2", "hsdp-2x2", 1), ("fsdp2_tp-2x2", "fsdp1-2", 2)]


@pytest.mark.parametrize(("first", "second", "num_parts"), PAIRS)
def test_a_file_does_not_depend_on_the_sharding(first, second, num_parts, tmp_path):
    path = str(tmp_path / "statistics.safetensors")
    run_ranks(saved, wrappings.world_size(first), first, path)
    single = str(tmp_path / "single.safetensors")
    run_ranks(saved_by_one_process, 1, single, num_parts)
    assert Path(path).read_bytes() == Path(single).read_bytes()
    size = wrappings.world_size(second)
    assert_nothing_wrong(run_ranks(wrong_after_loading, size, second, path, num_parts))


def saved_by_one_process(path: str, num_parts: int) -> None:
    data = [data_of(part) for part in range(num_parts)]
    whole_statistics(integer_net((6, 12, 5, 3)), data, None).save(path)


def errors_on_ranks(folder: str) -> list[str]:
    """What only one rank does wrong is an error on all, and nobody hangs."""
    rank = dist.get_rank()
    model = integer_net((6, 12, 5, 3))
    texts = []

    def attempt(step) -> None:
        try:
            step()
            texts.append("nothing")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")

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
        whole_statistics(model, [data_of(rank)], alone).save(path)
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
