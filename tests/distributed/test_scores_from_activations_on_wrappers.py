"""Wanda, RIA, STADE and outlier ratios on every wrapper: scores and masks of one process.

Weights and inputs are small integers, so that all sums are exact: then scores have the same bits,
and masks are equal from end to end.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distprune as prune
from distprune.budgets import OWL
from distprune.statistics import ActivationStatistics
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, wrong_masks
from helpers.integer_nets import integer_net
from helpers.sampling import every

NAMES = ["l1.weight", "l2.weight", "l3.weight"]
ALL = wrappings.sampled([*wrappings.ALL, *wrappings.FSDP2_DIM1])
CRITERIA = ["wanda", "ria", "stade"]


def parts_of_data(num_parts: int, num_features: int, dtype: torch.dtype) -> list[Tensor]:
    """One batch per part, each of another size."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(-1, 2, (2 + part, 2, num_features), generator=generator).to(dtype)
        for part in range(num_parts)
    ]


def independent_scores(net: nn.Module, inputs: Tensor, keeps: list[Tensor]) -> dict:
    """{criterion: {name: scores}} in float64, from the whole weights and all inputs."""
    found: dict[str, dict[str, Tensor]] = {criterion: {} for criterion in CRITERIA}
    x = inputs.double()
    for name, keep in zip(NAMES, keeps, strict=True):
        layer = net.get_submodule(name.partition(".")[0]).double()
        weight = layer.weight.detach() * keep
        size, norm = weight.abs(), x.square().mean(0).sqrt()
        by_column, by_row = size.sum(0, keepdim=True), size.sum(1, keepdim=True)
        relative = size / by_column.clamp(min=1) + size / by_row.clamp(min=1)
        found["wanda"][name] = size * norm
        found["stade"][name] = size * x.std(0, correction=0)
        found["ria"][name] = relative * norm.sqrt()
        x = torch.relu(x @ weight.T + layer.bias)
    return found


def multiplied(weight: Tensor, factored: prune.FactoredScores) -> Tensor:
    """|w| * m with one rounding to float32 per operation."""
    products = []
    for first, *others in factored.terms:
        for factor in others:
            first = first * factor
        products.append(first)
    multiplier = products[0] if len(products) == 1 else products[0] + products[1]
    return weight.detach().float().abs() * multiplier


def differences(wrapping: str, criterion: str, dtype: torch.dtype) -> list[str]:
    sizes = wrappings.runnable_sizes(wrapping)
    indices = wrappings.local_indices(integer_net(sizes, dtype, 2), wrapping)
    model = wrappings.wrap(integer_net(sizes, dtype, 2), wrapping)
    is_plain = wrappings.kind_of(wrapping) == "plain"
    size, rank = dist.get_world_size(), dist.get_rank()
    part, num_parts = (rank, size) if is_plain else wrappings.data_rank(wrapping)
    data = parts_of_data(num_parts, sizes[0], dtype)
    whole = integer_net(sizes, dtype, 2)
    keeps = [torch.ones(whole.get_parameter(name).shape, dtype=torch.bool) for name in NAMES]
    parameters = prune.select(model)
    wrong = []
    for amount in (0.3, 0.4):  # the second time with inputs and sums of what is left
        statistics = ActivationStatistics(parameters)
        with statistics.collecting():
            model(data[part])
        scores = getattr(statistics, criterion)()
        inputs = torch.cat([batch.flatten(0, 1) for batch in data])
        expected = independent_scores(integer_net(sizes, largest=2), inputs, keeps)[criterion]
        single = []
        for pair, keep in zip(parameters, keeps, strict=True):
            mine = multiplied(whole.get_parameter(pair.fqn) * keep, scores[pair])
            if not torch.allclose(mine.double(), expected[pair.fqn], rtol=1e-6, atol=0):
                wrong.append(f"{amount} {pair.fqn}: {mine.tolist()}, not {expected[pair.fqn]}")
            single.append(multiplied(whole.get_parameter(pair.fqn), scores[pair]))
        keeps = reference.prune(single, amount, keeps)
        prune.global_unstructured(parameters, prune.L1Unstructured, scores, amount=amount)
        wrong += wrong_masks(model, dict(zip(NAMES, keeps, strict=True)), indices, str(amount))
    return wrong


CASES = [(c, d) for d in (torch.float32, torch.bfloat16) for c in CRITERIA]


@pytest.mark.parametrize(
    ("wrapping", "case"),
    [(w, case) for i, w in enumerate(ALL) for case in every(3, CASES, start=i)],
)
def test_scores_and_masks_are_those_of_one_process(wrapping, case):
    assert_nothing_wrong(run_ranks(differences, wrappings.world_size(wrapping), wrapping, *case))


def wrong_ratios(wrapping: str) -> list[str]:
    sizes = wrappings.runnable_sizes(wrapping)
    model = wrappings.wrap(integer_net(sizes, largest=2), wrapping)
    part, num_parts = wrappings.data_rank(wrapping)
    data = parts_of_data(num_parts, sizes[0], torch.float32)
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        model(data[part])
    inputs = torch.cat([batch.flatten(0, 1) for batch in data])
    keeps = [torch.tensor(True)] * 3
    scores = independent_scores(integer_net(sizes, largest=2), inputs, keeps)["wanda"]
    found = statistics.outlier_ratios(threshold_multiple=1.5)
    wrong = []
    for pair in prune.select(model):
        size = scores[pair.fqn]
        expected = (size > 1.5 * size.mean()).double().mean().item()
        if found[pair] != expected:
            wrong.append(f"{pair.fqn}: {found[pair]}, not {expected}")
    report = prune.global_unstructured(
        prune.select(model),
        prune.L1Unstructured,
        statistics.wanda(),
        amount=0.5,
        budget=OWL(statistics, threshold_multiple=1.5),
    )
    if report.num_pruned != round(0.5 * report.num_elements):
        wrong.append(str(report))
    return wrong


@pytest.mark.parametrize("wrapping", every(2, wrappings.sampled(wrappings.SHARDED)))
def test_outlier_ratios_are_those_of_one_process(wrapping):
    assert_nothing_wrong(run_ranks(wrong_ratios, wrappings.world_size(wrapping), wrapping))


def traffic(wrapping: str) -> tuple[dict[str, int], int]:
    """Bytes of each way to ask, and the number of inputs and outputs of all layers."""
    sizes = wrappings.runnable_sizes(wrapping)
    model = wrappings.wrap(integer_net(sizes, largest=2), wrapping)
    _, num_parts = wrappings.data_rank(wrapping)
    data = parts_of_data(num_parts, sizes[0], torch.float32)[0]
    statistics = ActivationStatistics(prune.select(model))
    with Traffic() as forwards:
        model(data)
    with Traffic() as collecting, statistics.collecting():
        model(data)
    sent = {"collecting": collecting.num_bytes - forwards.num_bytes}
    for name in ("wanda", "stade", "ria"):
        with Traffic() as asked:
            getattr(statistics, name)()
        sent[name] = asked.num_bytes
        assert {call for call, _ in asked.calls} == {"allreduce_"}
    return sent, (sum(sizes[:3]), sum(sizes[1:]))


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "tp-2"])
def test_what_is_sent(wrapping):
    for sent, (num_inputs, num_outputs) in run_ranks(traffic, 2, wrapping):
        assert sent["collecting"] == 0
        flags = 40 + 8 * 2 * 3  # an agreement, and two words per parameter
        new = 8 * (2 * num_inputs + 4 * 3 + 1) + 16
        assert sent["wanda"] == flags + new
        assert sent["stade"] == flags  # nothing is new
        others = sent["ria"] - flags - 2 * 8 * (num_inputs + num_outputs + 1)
        assert 0 < others <= 40 + 3 * 8 * 10  # the parameters are read again and compared
