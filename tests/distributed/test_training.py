"""A pruned model trains as one process with the same masks does, whatever a training loop does.

Plans of helpers/random_sequences, which compares outputs, gradients, weights and masks in each
step. The plain case runs on every wrapper and world size: it is the support matrix.
"""

from itertools import product

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import Net, seeded
from helpers.random_sequences.plans import Plan, do, global_l1
from helpers.random_sequences.run import assert_nothing_differs
from helpers.random_sequences.state import OPTIMIZERS
from helpers.sampling import THOROUGH, every

WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
WRAPPINGS = [
    "plain-1", "ddp-2", "fsdp2-2", "fsdp2_root-2", "fsdp2_dim1-2", "hsdp-2x2", "tp-2",
    "fsdp2_tp-2x2", "fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "fsdp1_hybrid-2x2", "replicate-2",
    "fsdp2_replicate-2",
]  # fmt: skip
if THOROUGH:
    WRAPPINGS += ["ddp-3", "fsdp2-1", "fsdp2-3", "fsdp2_root-4", "hsdp-1x3"]


def l1(amount, **options):
    return global_l1(amount, WEIGHTS, **options)


def trained(number, **options):
    return [do("train", seed=step, **options) for step in range(number)]


LOOK = do("evaluate", seed=6, inference=True)
REMOVE = do("remove_all")
ACCUMULATED = {"micro_batches": 2, "clip": 0.05}
RUNS = {
    "optimizer before pruning": [*trained(3), l1(0.5), *trained(5)],
    "optimizer after pruning": [l1(0.5), do("new_optimizer"), *trained(5)],
    "removed and pruned again": [*trained(1), l1(0.5), *trained(3), REMOVE, *trained(2), l1(0.6),
                                 *trained(2)],
    "accumulated and clipped": [*trained(1, **ACCUMULATED), l1(0.4), *trained(3, **ACCUMULATED),
                                l1(0.5), *trained(2, **ACCUMULATED)],
    "evaluated in between": [LOOK, l1(0.3), LOOK, *trained(2), LOOK, l1(0.5), LOOK, *trained(2),
                             REMOVE, LOOK, *trained(1)],
    "pruned in inference mode": [*trained(1), l1(0.4, inference=True), *trained(2),
                                 l1(0.5, inference=True), *trained(2)],
}  # fmt: skip
MATRIX = list(product(OPTIMIZERS, list(RUNS)[:2]))
LOOPS = list(RUNS)[2:]


def plan(wrapping: str, operations: list, number: int = 0, optimizer: str = "", **options) -> Plan:
    """Args: number: decides on the optimizer, if none is given."""
    optimizer = optimizer or sorted(OPTIMIZERS)[number % 2]
    sizes = wrappings.runnable_sizes(wrapping)
    data = "net", sizes, "float32", "normal"
    return Plan(number, *data, wrapping, optimizer, tuple(operations), **options)


def check(wrapping: str, runs: list[str], **options) -> None:
    assert_nothing_differs([plan(wrapping, RUNS[run], i, **options) for i, run in enumerate(runs)])


@pytest.mark.parametrize("wrapping", wrappings.MATRIX)
def test_every_wrapper_and_world_size(wrapping):
    chosen = every(len(MATRIX), MATRIX, wrappings.MATRIX.index(wrapping))
    assert_nothing_differs([plan(wrapping, RUNS[run], 1, optimizer) for optimizer, run in chosen])


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_training_equals_one_process(wrapping):
    check(wrapping, every(4, LOOPS, WRAPPINGS.index(wrapping)))


OPTIONS = [
    *((w, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}) for w in ("fsdp2-2", "hsdp-2x2")),
    *((w, {"reshard_after_forward": False}) for w in ("fsdp2_root-2", "fsdp2_tp-2x2")),
    *((w, {"reshard_after_forward": 2}) for w in ("fsdp2_root-4", "fsdp2-4")),
    *((w, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP})
      for w in ("fsdp1_root-2", "fsdp1-3", "fsdp1_flat-4")),
    ("fsdp1-4", {"limit_all_gathers": False, "forward_prefetch": True}),
]  # fmt: skip


@pytest.mark.parametrize(("wrapping", "options"), every(2, OPTIONS))
def test_options_of_fsdp(wrapping, options):
    check(wrapping, LOOPS[:2], options=options)


@pytest.mark.parametrize("recompute", ["inside", "wrapper"])
@pytest.mark.parametrize(
    "wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-2", "fsdp2_root-2", "tp-2"]
)
def test_activation_checkpointing(wrapping, recompute):
    if recompute == "wrapper" and wrapping == "tp-2":
        pytest.skip("torch's ColwiseParallel does not know a layer that is wrapped already")
    check(wrapping, [LOOPS[0], LOOPS[2]], recompute=recompute)


COMPILED = ["plain-1", "ddp-2", "fsdp2-2", "fsdp2_root-2", "tp-2", "fsdp2_tp-1x2"]


@pytest.mark.parametrize("wrapping", every(6, COMPILED))
def test_compiled(wrapping):
    for compiler in every(2, ["eager", "aot_eager"], COMPILED.index(wrapping)):
        check(wrapping, [LOOPS[2] if compiler == "eager" else LOOPS[0]], compiler=compiler)


def test_two_forwards_before_the_first_backward():
    """Under tensor parallelism autograd saves the shard itself."""
    together = trained(3, micro_batches=2, together=True)
    assert_nothing_differs([plan("tp-2", [*together, l1(0.5), *together])])


@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-2", "fsdp2_root-3", "tp-2"])
def test_frozen_parameters(wrapping):
    assert_nothing_differs([plan(wrapping, [do("freeze"), l1(0.5, look=True)])])


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1_flat-2"])
def test_summon_full_params_shows_the_stored_weights(wrapping):
    assert_nothing_differs([plan(wrapping, [l1(0.5), do("summon", True), *trained(2)])])


# Whatever swaps the tensors of a pruned model, the masks act on, or forward raises.

SWAPPED = ["plain-1", "ddp-2", "tp-2", "fsdp2-1", "fsdp2-2", "fsdp2_root-2", "fsdp2-3", "hsdp-2x2",
           "fsdp2_tp-2x2", "fsdp1-2", "fsdp1_root-3"]  # fmt: skip
HOW = ["load", "assign", "assign other masks", "to_empty, meta first", "to_empty, load", "float64"]
TORCH_CANNOT = {  # pruned or not: they keep tensors that they saw when they were made
    "ddp": ["to_empty, meta first", "float64"],
    "fsdp1": ["assign other masks", "to_empty, meta first", "float64"],
}


@pytest.mark.parametrize("wrapping", SWAPPED)
def test_masks_survive(wrapping):
    plans = []
    first = (False, True) if wrappings.world_size(wrapping) <= 2 else (True,)
    for how, is_trained in product(HOW, first):
        if how in TORCH_CANNOT.get(wrappings.kind_of(wrapping)[:5], ()):
            continue
        if how == "float64" and is_trained and wrapping.startswith(("fsdp2", "hsdp")):
            continue  # torch's FSDP2 cannot change the dtype after a forward, pruned or not
        swap = do("replace_tensors", how != "assign other masks", how=how)
        # DDP reduces the gradients of the parameters that it saw first.
        is_apart = wrapping.startswith("ddp") and how.startswith("assign")
        later = [LOOK] if is_apart else trained(2)
        plans.append(plan(wrapping, [l1(0.5), *trained(is_trained), swap, *later, REMOVE]))
    assert_nothing_differs(plans)


def mask_of_another_layout() -> str:
    model = wrappings.wrap(seeded(Net()), "fsdp2_root-2")
    prune.l1_unstructured(model.l1, "weight", 0.5)
    model(torch.ones(2, 6)).sum().backward()
    model.l1.weight_mask = torch.ones(10, 6)
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 6))
    return str(error.value)


def test_forward_raises_where_masks_cannot_act():
    for replaced in run_ranks(mask_of_another_layout, 2):
        assert "Linear.weight was replaced" in replaced and "custom_from_mask" in replaced
