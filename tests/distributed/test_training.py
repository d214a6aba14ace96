"""A pruned model trains as one process with torch.nn.utils.prune and the same masks does.

The plain case, on every wrapper and world size, is test_matrix.py; here is all that a training
loop does beside it.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.sampling import THOROUGH, every
from helpers.training_pair import OPTIMIZERS, Pair, train

WRAPPINGS = [
    *["plain-1", "ddp-2", "fsdp2-2", "fsdp2_root-2", "fsdp2_dim1-2", "hsdp-2x2", "tp-2"],
    *["fsdp2_tp-2x2", "fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "fsdp1_hybrid-2x2"],
    *["replicate-2", "fsdp2_replicate-2"],
]
if THOROUGH:
    WRAPPINGS += ["ddp-3", "fsdp2-1", "fsdp2-3", "fsdp2_root-4", "hsdp-1x3"]
PLANS = {  # the optimizer is made before pruning; see pair.train
    "removed and pruned again": {"amounts": {1: 0.5, 7: 0.6}, "remove_at": 4},
    "accumulated and clipped": {"amounts": {1: 0.4, 6: 0.5}, "micro_batches": 2, "clip": 0.05},
    "evaluated in between": {"amounts": {0: 0.3, 5: 0.5}, "evaluate": True, "remove_at": 8},
    "pruned in inference mode": {"amounts": {1: 0.4, 3: 0.5}, "inference": True},
    "pruned twice": {"amounts": {2: 0.4, 6: 0.5}},
}


def differences(wrapping: str, plans: list[str], **options) -> list[str]:
    """With both optimizers in turn: test_matrix.py has all combinations."""
    optimizers = itertools.cycle(sorted(OPTIMIZERS, reverse=dist.get_world_size() % 2 == 0))
    return [
        f"{plan}, {optimizer}: {wrong}"
        for plan, optimizer in zip(plans, optimizers, strict=False)
        for wrong in train(Pair(wrapping, **options), optimizer, PLANS[plan]).wrong
    ]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_training_equals_one_process(wrapping):
    size = wrappings.world_size(wrapping)
    plans = list(PLANS)[: None if size <= 2 else 3]  # more ranks than 2 are dear
    plans = every(3, plans, WRAPPINGS.index(wrapping))
    assert_nothing_wrong(run_ranks(differences, size, wrapping, plans))


KEPT = {"reshard_after_forward": False}
OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
GRADIENTS = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
PREFETCHED = {"limit_all_gathers": False, "forward_prefetch": True}
OPTIONS = [
    *((wrapping, OFFLOADED) for wrapping in ("fsdp2-2", "hsdp-2x2")),
    *((wrapping, KEPT) for wrapping in ("fsdp2_root-2", "fsdp2_tp-2x2")),
    *((wrapping, GRADIENTS) for wrapping in ("fsdp1_root-2", "fsdp1-3", "fsdp1_flat-4")),
    ("fsdp1-4", PREFETCHED),
]


@pytest.mark.parametrize(("wrapping", "options"), every(2, OPTIONS))
def test_training_with_options_of_fsdp(wrapping, options):
    plans = ["evaluated in between", "accumulated and clipped"]
    assert_nothing_wrong_on(wrapping, differences, plans, **options)


@pytest.mark.parametrize(
    "wrapping", ["fsdp2_root-4", pytest.param("fsdp2-4", marks=pytest.mark.thorough)]
)
def test_resharding_to_a_smaller_mesh_after_forward(wrapping):
    plans = ["evaluated in between", "removed and pruned again", "accumulated and clipped"]
    assert_nothing_wrong_on(wrapping, differences, plans, reshard_after_forward=2)


@pytest.mark.parametrize("recompute", ["inside", "wrapper"])
@pytest.mark.parametrize(
    "wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-2", "fsdp2_root-2", "tp-2"]
)
def test_activation_checkpointing(wrapping, recompute):
    if recompute == "wrapper" and wrapping == "tp-2":
        pytest.skip("torch's ColwiseParallel does not know a layer that is wrapped already")
    plans = ["removed and pruned again", "evaluated in between"]
    plans = every(2, plans, int(recompute == "wrapper"))
    assert_nothing_wrong_on(wrapping, differences, plans, recompute=recompute)


def frozen(wrapping: str) -> list[str]:
    """Parameters that need no gradient can be pruned too."""
    pair = Pair(wrapping)
    for parameter in [*pair.model.parameters(), *pair.dense.parameters()]:
        parameter.requires_grad_(False)
    pair.prune(0.5)
    pair.compare_values("frozen")
    pair.compare_outputs(torch.ones(12, pair.dense.l1.in_features), "frozen")
    return pair.wrong


@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-2", "fsdp2_root-3", "tp-2"])
def test_frozen_parameters(wrapping):
    assert_nothing_wrong_on(wrapping, frozen)


def summoned(wrapping: str) -> list[str]:
    """Inside summon_full_params the stored weights are whole."""
    pair = Pair(wrapping)
    pair.prune(0.5)
    x = torch.ones(2, 6)
    with torch.no_grad():
        pair.model(x)  # the root keeps a gathered copy
    layer = pair.model.module.l1.module
    with FullyShardedDataParallel.summon_full_params(pair.model, writeback=True):
        pair.close(layer.weight, pair.dense.l1.weight, "summoned")
        layer.weight.data.add_(1)
    with torch.no_grad():
        pair.dense.l1.weight_orig.add_(1)
    prune.hold_zeros(pair.model)
    pair.compare_values("written back")
    pair.close(pair.model(x), pair.dense(x), "after")
    return pair.wrong


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1_flat-2"])
def test_summon_full_params_shows_the_stored_weights(wrapping):
    assert_nothing_wrong_on(wrapping, summoned)
