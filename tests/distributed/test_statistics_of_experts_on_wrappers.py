"""Fused experts on every data-parallel wrapper: the sums and the masks of one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distprune as prune
from distprune import budgets
from distprune.statistics import ActivationStatistics, prune_sequentially
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, wrong_masks
from helpers.fused_experts import IMPLEMENTATIONS, expected, experts_net, tokens_of

NAMES = ("gate_up_proj", "down_proj")
FUSED = [f"{layer}.{name}" for layer in ("first", "second") for name in NAMES]
WRAPPINGS = [
    "plain-2", "ddp-2", "fsdp1-2", "fsdp1_root-3", "fsdp1_hybrid-2x2", "fsdp2-3", "fsdp2_root-2",
    "fsdp2_dim1-2", "hsdp-2x2",
]  # fmt: skip


def parts_of(wrapping):
    """The tokens of each data-parallel rank, and which of them are this rank's."""
    _, num_parts = wrappings.data_rank(wrapping)
    if wrappings.kind_of(wrapping) == "plain":
        num_parts = dist.get_world_size()
    return [tokens_of(part) for part in range(num_parts)], dist.get_rank()


def collect(model, batches, group=None):
    pairs = prune.select(wrappings.unwrapped(model), names=NAMES)
    statistics = ActivationStatistics(pairs, group=group)
    with statistics.collecting():
        for batch in batches:
            model(batch)
    return statistics


def wrong_totals(statistics, reference, when):
    wrong = []
    for pair, found in statistics.totals().items():
        num_tokens, sums, squares = reference[pair.fqn]
        if found.num_tokens != num_tokens:
            wrong.append(f"{when} {pair.fqn}: {found.num_tokens} tokens, not {num_tokens}")
        if not torch.equal(found.sums, sums) or not torch.equal(found.squares, squares):
            wrong.append(f"{when} {pair.fqn}: {found.sums.tolist()}, not {sums.tolist()}")
    return wrong


def pruned(statistics, group, score, **options):
    pairs = list(statistics.totals())
    return prune.global_unstructured(
        pairs, prune.L1Unstructured, getattr(statistics, score)(), group=group, **options
    )


def differences(wrapping, implementation, score, by_owl):
    warnings.simplefilter("ignore")
    parts, part = parts_of(wrapping)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dense, model = experts_net(implementation), experts_net(implementation)
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(model, wrapping)
    statistics = collect(model, [parts[part]])
    wrong = wrong_totals(statistics, expected(experts_net(), parts), "first")
    right = collect(dense, parts, alone)
    counts = []
    for of_one, group in ((statistics, None), (right, alone)):
        options = {"amount": 0.5}
        if by_owl:
            ratios = of_one.outlier_ratios(threshold_multiple=1.5, per="parameter")
            options["amount"] = budgets.owl(of_one.parameters, 0.5, ratios, lam=0.2)
        report = pruned(of_one, group, score, **options)
        counts.append([entry.num_pruned for entry in report.parameters])
    if counts[0] != counts[1]:
        wrong.append(f"{counts[0]} are pruned, not {counts[1]}")
    keeps = {}
    for name in FUSED:
        layer, parameter = name.split(".")
        keeps[name] = dense.get_submodule(layer).get_buffer(parameter + "_mask").clone()
    wrong += wrong_masks(model, keeps, indices)
    # Pruned experts are seen with their masks.
    with torch.no_grad():
        masked = experts_net()
        for name in FUSED:
            masked.get_parameter(name).mul_(keeps[name])
    reference = expected(masked, parts)
    wrong += wrong_totals(collect(model, [parts[part]]), reference, "pruned")
    dist.destroy_process_group(alone)
    return wrong


CASES = [("wanda", True), ("ria", False), ("stade", False)]


@pytest.mark.parametrize(
    ("wrapping", "implementation", "case"),
    [
        (wrapping, IMPLEMENTATIONS[number % 2], CASES[number % 3])
        for number, wrapping in enumerate(WRAPPINGS)
    ],
)
def test_sums_and_masks_are_those_of_one_process(wrapping, implementation, case):
    assert_nothing_wrong_on(wrapping, differences, implementation, *case)


def sequential(wrapping):
    """Masks, after each of the two layers of experts is pruned by its own inputs."""
    warnings.simplefilter("ignore")
    parts, part = parts_of(wrapping)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dense = experts_net()
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(experts_net("grouped_mm"), wrapping)
    found = []
    for each, batches, group in ((model, [parts[part]], None), (dense, parts, alone)):
        inner = wrappings.unwrapped(each)
        statistics = ActivationStatistics(prune.select(inner, names=NAMES), group=group)

        def prune_block(pairs, statistics=statistics, group=group):
            return prune.global_unstructured(
                pairs, prune.L1Unstructured, statistics.wanda(pairs), amount=0.5, group=group
            )

        blocks = [inner.first, inner.second]
        prune_sequentially(statistics, each, blocks, batches, prune_block)
        found.append(statistics.num_tokens())
    wrong = [] if found[0] == found[1] else [f"{found[0]}, not {found[1]}"]
    keeps = {}
    for name in FUSED:
        layer, parameter = name.split(".")
        keeps[name] = dense.get_submodule(layer).get_buffer(parameter + "_mask").clone()
    dist.destroy_process_group(alone)
    return wrong + wrong_masks(model, keeps, indices)


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2-2"])
def test_layer_after_layer(wrapping):
    assert_nothing_wrong_on(wrapping, sequential)


def mixed(implementation):
    """Weights are gathered in another dtype, layer by layer and with the experts on their own."""
    parts = [tokens_of(part) for part in range(2)]
    model = experts_net(implementation)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (model.first, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    statistics = collect(model, [parts[dist.get_rank()]])
    return wrong_totals(statistics, expected(experts_net(), parts), "bfloat16")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_mixed_precision(implementation):
    assert_nothing_wrong(run_ranks(mixed, 2, implementation))


def beside_tensor_parallelism():
    """Ranks of a tensor-parallel group have the same tokens: one counts."""
    tokens = tokens_of(1)
    mesh = init_device_mesh("cpu", (2,))
    model = experts_net()
    parallelize_module(model, mesh, {"l1": ColwiseParallel(output_layouts=Replicate())})
    statistics = ActivationStatistics(prune.select(model, names=("weight", *NAMES)))
    with statistics.collecting():
        model(tokens)
    reference = expected(experts_net(), [tokens])
    wrong = []
    for pair, found in statistics.totals().items():
        if pair.fqn in reference and found.num_tokens != reference[pair.fqn][0]:
            wrong.append(f"{pair.fqn}: {found.num_tokens}, not {reference[pair.fqn][0]}")
        if pair.fqn in reference and not torch.equal(found.squares, reference[pair.fqn][2]):
            wrong.append(f"{pair.fqn}: {found.squares.tolist()}")
    return wrong


def test_whole_experts_beside_tensor_parallelism():
    assert_nothing_wrong(run_ranks(beside_tensor_parallelism, 2))


def spread():
    """What is said of experts whose weights are DTensors while they run."""
    model = experts_net()
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(model.first.down_proj.data, mesh, [Shard(0)]))
    model.first.down_proj = weight
    statistics = ActivationStatistics(prune.select(model, names=NAMES))
    try:
        with statistics.collecting():
            model(tokens_of(1))
    except NotImplementedError as error:
        return str(error), sum(len(m._forward_hooks) for m in model.modules())


def test_experts_that_are_spread_over_ranks_are_refused_by_name():
    for text, num_hooks in run_ranks(spread, 2):
        assert text.startswith("first.down_proj: ") and "DTensor" in text and num_hooks == 0
