"""A mesh whose ranks do not ascend: torch contradicts itself there, so pruning is refused by name.

``fully_shard`` cuts by the rank inside the process group, which torch sorts; checkpoints and
``distribute_tensor`` without a source rank go by the coordinate in the mesh.
"""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong, changes, snapshot
from helpers.models import Net, seeded
from helpers.wrappings import local


def wrapped(kind, ranks):
    model = seeded(Net((6, 12, 6, 12)))
    names = ("dp", "tp") if isinstance(ranks[0], list) else ("dp",)
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    if kind == "tp":
        return parallelize_module(model, mesh, {"l1": ColwiseParallel()})
    if kind == "fsdp2_tp":
        parallelize_module(model, mesh["tp"], {"l1": ColwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh)


def pruned(kind, ranks, call):
    """What the call raised, and what it changed all the same."""
    model = wrapped(kind, ranks)
    before = snapshot(model)
    try:
        call(model)
    except NotImplementedError as error:
        return str(error), changes(before, snapshot(model))
    return None, []


def prune_one(model):
    prune.l1_unstructured(model.l1, "weight", 0.5)


def prune_all(model):
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)


REFUSED = {
    "FSDP2": ("fsdp2", [2, 0, 1]),
    "HSDP": ("fsdp2", [[3, 1], [0, 2]]),
    "HSDP, on some ranks only": ("fsdp2", [[0, 1], [3, 2]]),
    "TP": ("tp", [1, 0]),
    "FSDP2 over TP: the shards of FSDP2": ("fsdp2_tp", [[2, 3], [0, 1]]),
    "FSDP2 over TP: those of TP": ("fsdp2_tp", [[1, 0], [3, 2]]),
}


@pytest.mark.parametrize("call", [prune_one, prune_all])
@pytest.mark.parametrize("case", REFUSED)
def test_every_rank_refuses_and_nothing_changes(case, call):
    kind, ranks = REFUSED[case]
    for message, changed in run_ranks(pruned, torch.tensor(ranks).numel(), kind, ranks, call):
        assert message is not None and "ranks do not ascend" in message and str(ranks) in message
        assert changed == []


def wrong_on_ascending_lines(ranks, first):
    """HSDP whose shards lie on ascending ranks; only the replicas are listed in another order."""
    model = wrapped("fsdp2", ranks)
    full = seeded(Net((6, 12, 6, 12)))
    prune_all(model)
    named = {name: p.detach() for name, p in full.named_parameters() if name.endswith("weight")}
    keeps = dict(zip(named, reference.prune(list(named.values()), 0.5), strict=True))
    wrong = []
    for path, layer in model.named_children():
        keep = keeps[f"{path}.weight"]
        half = keep.shape[0] // 2
        part = keep[:half] if torch.distributed.get_rank() in first else keep[half:]
        if not torch.equal(local(layer.weight_mask), part.bool()):
            wrong.append(path)
    return wrong


def test_replicas_may_be_listed_in_any_order():
    assert_nothing_wrong(run_ranks(wrong_on_ascending_lines, 4, [[2, 3], [0, 1]], {0, 2}))
