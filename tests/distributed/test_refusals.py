"""What is not supported is refused by name, on every rank, before anything changes.

A mesh whose ranks do not ascend is refused because torch contradicts itself there: ``fully_shard``
cuts by the rank inside the process group, which torch sorts; checkpoints and
``distribute_tensor`` without a source rank go by the coordinate in the mesh.
"""

import gc
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, other_errors, outcome
from helpers.models import Net, fill, seeded


def net(wrapping: str, **options) -> nn.Module:
    return wrappings.wrap(fill(Net(), "normal", "float32"), wrapping, **options)


def prune_all(model: nn.Module, **arguments) -> None:
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5, **arguments)


def prune_one(model: nn.Module) -> None:
    prune.l1_unstructured(wrappings.unwrapped(model).l1, "weight", 0.5)


# Each makes a model, and what is called with it.


def partial_placement(call):
    model = fill(Net(), "normal", "float32")
    weight, mesh = model.l1.weight.data, init_device_mesh("cpu", (2,))
    model.l1.weight = nn.Parameter(DTensor.from_local(weight, mesh, [Partial()]))
    return model, call


def scores_on_other_placements():
    model = net("fsdp2-2")
    scores = distribute_tensor(torch.ones(10, 6), model.l1.weight.device_mesh, [Shard(1)])
    return model, partial(prune_all, importance_scores={(model.l1, "weight"): scores})


def fsdp1(case: str, use_orig_params: bool = True, single: bool = True):
    strategy = getattr(ShardingStrategy, case, ShardingStrategy.FULL_SHARD)
    model = net("fsdp1-2", use_orig_params=use_orig_params, sharding_strategy=strategy)
    layer, targets = model.module.l1.module, prune.select(model)
    if case == "without its wrapper":
        model.module.l1 = layer
        gc.collect()

    def call(model):
        if single:
            prune.l1_unstructured(layer, "weight", 0.5)
        else:
            prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)

    summoned = FullyShardedDataParallel.summon_full_params(model)
    return model, call, summoned if case == "summoned" else nullcontext()


def on_a_mesh(kind: str, ranks: list) -> nn.Module:
    model = seeded(Net((6, 12, 6, 12)))
    names = ("dp", "tp") if isinstance(ranks[0], list) else ("dp",)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    if kind == "tp":
        return parallelize_module(model, mesh, {"l1": ColwiseParallel()})
    if kind == "fsdp2_tp":
        parallelize_module(model, mesh["tp"], {"l1": ColwiseParallel()})
        mesh = mesh["dp"]
    return fully_shard(model, mesh=mesh)


def out_of_order(kind: str, ranks: list, call):
    return on_a_mesh(kind, ranks), call


def group_without_all_shards(wrapping: str, groups: list):
    """A part of the shards cannot know which elements are the lowest of the parameter."""
    made = [dist.new_group(ranks) for ranks in groups]  # on every rank, all of them
    group = next(g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)
    return net(wrapping), partial(prune_all, group=group)


ORDER = "ranks do not ascend"
MESHES = {
    "FSDP2": ("fsdp2", [2, 0, 1]),
    "HSDP": ("fsdp2", [[3, 1], [0, 2]]),
    "HSDP, on some ranks only": ("fsdp2", [[0, 1], [3, 2]]),
    "TP": ("tp", [1, 0]),
    "FSDP2 over TP: the shards of FSDP2": ("fsdp2_tp", [[2, 3], [0, 1]]),
    "FSDP2 over TP: those of TP": ("fsdp2_tp", [[1, 0], [3, 2]]),
}
WAYS_OUT = {"NO_SHARD": "DistributedDataParallel", "summoned": "outside of that context"}
PLACEMENT = r"weight(.|\n)*(Partial|P\(sum\))"
CASES = [  # number of ranks, how the model is made, the error
    (2, partial(partial_placement, prune_one), PLACEMENT),
    (2, partial(partial_placement, prune_all), PLACEMENT),
    (2, scores_on_other_placements, r"weight(.|\n)*Shard\(dim=1\)", "ValueError"),
    (2, partial(fsdp1, "without its wrapper"), "whose wrapper is gone"),
    *(
        (2, partial(fsdp1, case, use_orig_params, single), text)
        for case, text in WAYS_OUT.items()
        for use_orig_params in (False, True)
        for single in (False, True)
    ),
    *(
        (torch.tensor(ranks).numel(), partial(out_of_order, kind, ranks, call), ORDER)
        for kind, ranks in MESHES.values()
        for call in (prune_one, prune_all)
    ),
]
GROUPS = [
    ("fsdp2-2", [[0], [1]]),
    ("tp-2", [[0], [1]]),
    ("fsdp2-4", [[0, 1], [2, 3]]),
    ("hsdp-2x2", [[0, 2], [1, 3]]),
    ("fsdp2_tp-2x2", [[0, 1], [2, 3]]),
]
CASES += [
    (wrappings.world_size(each[0]), partial(group_without_all_shards, *each), "group", "ValueError")
    for each in GROUPS
]


def outcomes(makers: list) -> list[tuple]:
    """What each call raises on this rank, and changes."""
    found = []
    for make in makers:
        model, call, *contexts = make()
        with contexts[0] if contexts else nullcontext():
            found.append(outcome(model, partial(call, model)))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_refuses_and_nothing_changes(size):
    cases = [case for case in CASES if case[0] == size]
    wrong, per_rank = [], run_ranks(outcomes, size, [make for _, make, *_ in cases])
    for (_, make, text, *kind), found in zip(cases, zip(*per_rank, strict=True), strict=True):
        wrong += other_errors(found, (kind or ["NotImplementedError"])[0], text, str(make))
    assert not wrong, "\n".join(wrong)[:5000]


def wrong_on_ascending_lines(ranks: list, first: set) -> list[str]:
    """HSDP whose shards lie on ascending ranks; only the replicas are listed in another order."""
    model, full = on_a_mesh("fsdp2", ranks), seeded(Net((6, 12, 6, 12)))
    prune_all(model)
    layers = dict(model.named_children())
    keeps = reference.prune([full.get_submodule(path).weight for path in layers], 0.5)
    wrong = []
    for (path, layer), keep in zip(layers.items(), keeps, strict=True):
        part = keep.chunk(2)[0 if dist.get_rank() in first else 1]
        if not torch.equal(wrappings.local(layer.weight_mask), part):
            wrong.append(path)
    return wrong


def test_replicas_may_be_listed_in_any_order():
    assert_nothing_wrong(run_ranks(wrong_on_ascending_lines, 4, [[2, 3], [0, 1]], {0, 2}))
