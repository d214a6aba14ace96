"""torch.compile: a pruned model breaks no graph that the dense one does not.

That it trains as one process does: test_training.py.
"""

import pytest
import torch
import torch.distributed as dist
from test_communication import WithBatchNorm
from torch import nn

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import EVEN_HIDDEN, Net, fill, seeded, target

WRAPPINGS = ["plain-1", "ddp-2", "fsdp2-2", "fsdp2_root-2", "tp-2", "fsdp2_tp-1x2"]
NUM_PRUNINGS = 3


def graphs(wrapping: str) -> list[tuple[str, int, list[int]]]:
    """Graph breaks, and the number of graphs after each step: dense, pruned, pruned each time."""
    from torch._dynamo.utils import counters

    results = []
    for how in ("dense", "pruned", "pruned again"):
        torch._dynamo.reset()
        counters.clear()
        model = wrappings.wrap(fill(Net(EVEN_HIDDEN), "normal", "float32"), wrapping)
        compiled = torch.compile(model, backend="eager")
        layers = [target(wrappings.unwrapped(model), f"l{i}.weight") for i in (1, 2, 3)]
        num_graphs = []
        for step in range(NUM_PRUNINGS):
            if how == "pruned again" or (how == "pruned" and step == 0):
                prune.global_unstructured(layers, prune.L1Unstructured, amount=0.2)
            compiled(torch.ones(4, 6)).square().mean().backward()
            num_graphs.append(counters["stats"]["unique_graphs"])
        results.append((how, sum(counters["graph_break"].values()), num_graphs))
    torch._dynamo.reset()
    return results


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_no_graph_breaks_are_added(wrapping):
    for dense, pruned, again in run_ranks(graphs, wrappings.world_size(wrapping), wrapping):
        assert pruned[1:] == dense[1:]
        assert again[1] == dense[1]
        # Compiled once more for the second pruning, whose hook is of another class, and no more.
        assert again[2][-1] <= 2 * dense[2][-1]
        assert again[2][1:] == [again[2][1]] * (NUM_PRUNINGS - 1)


def bytes_of_buffers(pruned: bool) -> list[int]:
    """What compiled DDP broadcasts at each forward."""
    model = nn.parallel.DistributedDataParallel(seeded(WithBatchNorm()))
    if pruned:
        linear = model.module.linear
        prune.global_unstructured([(linear, "weight")], prune.L1Unstructured, amount=0.5)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    sizes, broadcast = [], dist._broadcast_coalesced

    @torch.compiler.disable
    def count(group, tensors, *arguments):
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        return broadcast(group, tensors, *arguments)

    dist._broadcast_coalesced = count
    try:
        for _ in range(3):
            compiled(torch.randn(4, 6)).sum().backward()
    finally:
        dist._broadcast_coalesced = broadcast
        torch._dynamo.reset()
    return sizes


def test_compiled_ddp_does_not_broadcast_masks():
    dense, pruned = (run_ranks(bytes_of_buffers, 2, each) for each in (False, True))
    assert len(dense[0]) == 3 and min(dense[0]) >= 2 * 50 * 4
    for before, after in zip(dense, pruned, strict=True):
        assert after[1:] == before[1:]  # the first forward tells DDP
