"""Pruning sends kilobytes; a pruned model sends what the dense one sends and keeps no more."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.models import EVEN_HIDDEN, Net, fill, seeded


def prune_weights(model: nn.Module, amount: float = 0.5, weights: bool = True):
    targets = prune.select(
        model, names="weight" if weights else ("weight", "bias"), everything=True
    )
    return prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)


def traffic_of(wrapping: str, what: str, data: str, width: int):
    """What one call sends, counted here and by its report."""
    model = wrappings.wrap(fill(Net((width, 4 * width, width, 8)), data, "float32"), wrapping)
    pairs = prune.select(wrappings.unwrapped(model), everything=True)
    bounds = {"min_sparsity": {"l3.weight": 0.95}, "max_sparsity": {"l1.weight": 0.5}}
    with Traffic() as traffic:
        if what == "global_mask":
            report = prune.global_mask(pairs, width * width)
        else:
            given = bounds if what == "bounds" else {}
            report = prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.6, **given)
    if what == "bounds":
        assert sum(entry.held_at is not None for entry in report.parameters) >= 1
    return traffic.calls, report.num_collectives, report.bytes_sent


@pytest.mark.parametrize("what", ["amount", "bounds", "global_mask"])
@pytest.mark.parametrize("data", ["normal", "equal", "few"])  # "equal": every score is a tie
@pytest.mark.parametrize(
    "wrapping", ["plain-3", "ddp-2", "fsdp2-2", "fsdp2-3", "hsdp-2x2", "fsdp2_tp-2x2"]
)
def test_a_call_sends_kilobytes_whatever_the_size(wrapping, data, what):
    """Every rank makes the same calls, and the report counts them."""
    size = wrappings.world_size(wrapping)
    totals = []
    for width in (100, 400):  # 81 thousand and 1.3 million elements, 5 MB
        per_rank = run_ranks(traffic_of, size, wrapping, what, data, width)
        totals.append(max(sum(num_bytes for _, num_bytes in calls) for calls, _, _ in per_rank))
        assert all(found == per_rank[0] for found in per_rank)
        for calls, num_collectives, bytes_sent in per_rank:
            assert 0 < num_collectives == len(calls) < 60
            assert bytes_sent == sum(num_bytes for _, num_bytes in calls)
            gathers = [num_bytes for name, num_bytes in calls if "gather" in name]
            assert sum(gathers) < 64 * 1024, calls
    assert totals[1] < (800_000 if what == "bounds" else 400_000)
    assert totals[1] < totals[0] + 200_000


def traffic_of_rows(wrapping: str, dtype: str):
    """What a call sends that ranks by rows; and the bytes of this rank's elements of cut rows."""
    model = wrappings.wrap(fill(Net((96, 400, 96, 8)), "few", dtype), wrapping)
    targets = prune.select(model, names="weight", everything=True)
    with Traffic() as traffic:
        report = prune.global_unstructured(targets, prune.L1Unstructured, scope="row", amount=0.5)
    cut = model.l2.weight.to_local()
    return traffic.calls, report.num_collectives, report.bytes_sent, cut.numel() * cut.itemsize


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrapping", ["tp-2", "tp-4"])
def test_rows_that_are_cut_send_their_keys_once(wrapping, dtype):
    size = wrappings.world_size(wrapping)
    for calls, num_collectives, bytes_sent, num_bytes in run_ranks(
        traffic_of_rows, size, wrapping, dtype
    ):
        assert {name for name, _ in calls} == {"allreduce_"}
        assert num_collectives == len(calls) < 20
        assert num_bytes * size <= bytes_sent < num_bytes * size + 1024


def traffic_of_steps(wrapping: str, pruned: bool, weights: bool) -> list[list[tuple[str, int]]]:
    """The collectives of forward and backward, in two steps."""
    model = wrappings.wrap(seeded(Net(EVEN_HIDDEN)), wrapping)
    if pruned:
        prune_weights(model, weights=weights)
    steps = []
    for _ in range(2):
        with Traffic() as traffic:
            model(torch.ones(4, 6)).square().mean().backward()
        steps.append(traffic.calls)
    return steps


@pytest.mark.parametrize("weights", [True, False], ids=["weights", "all parameters"])
@pytest.mark.parametrize(
    "wrapping",
    [
        *["ddp-2", "fsdp2-2", "fsdp2-3", "fsdp2_root-2", "hsdp-2x2", "tp-2", "fsdp2_tp-2x2"],
        *["fsdp1-2", "fsdp1_flat-2", "fsdp1_hybrid-2x2"],
    ],
)
def test_a_step_of_the_pruned_model_sends_what_the_dense_one_sends(wrapping, weights):
    size = wrappings.world_size(wrapping)
    dense = run_ranks(traffic_of_steps, size, wrapping, False, weights)
    assert all(calls for steps in dense for calls in steps)
    assert run_ranks(traffic_of_steps, size, wrapping, True, weights) == dense


class WithBatchNorm(nn.Module):
    """DDP broadcasts the running statistics at each forward; masks must not travel with them."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 50), nn.BatchNorm1d(50)

    def forward(self, x):
        return self.norm(self.linear(x))


def broadcast_sizes(pruned: str, forward_first: bool, is_compiled: bool) -> list[int]:
    """Bytes that DDP broadcasts at each of three forwards."""
    model = seeded(WithBatchNorm())
    linear = [(model.linear, "weight")]
    if pruned == "before wrapping":
        prune.global_unstructured(linear, prune.L1Unstructured, amount=0.5)
    model = DistributedDataParallel(model)
    if forward_first:
        model(torch.randn(4, 6)).sum().backward()
    if pruned == "after wrapping":
        prune.global_unstructured(linear, prune.L1Unstructured, amount=0.5)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager") if is_compiled else model
    sizes, broadcast = [], dist._broadcast_coalesced

    @torch.compiler.disable
    def count(group, tensors, *arguments):
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        return broadcast(group, tensors, *arguments)

    with mock.patch.object(dist, "_broadcast_coalesced", count):
        for _ in range(3):
            run(torch.randn(4, 6)).sum().backward()
    torch._dynamo.reset()
    return sizes


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("forward_first", [False, True])
@pytest.mark.parametrize("pruned", ["after wrapping", "before wrapping"])
def test_ddp_does_not_broadcast_masks_at_each_forward(pruned, forward_first, is_compiled):
    dense = run_ranks(broadcast_sizes, 2, "no", forward_first, is_compiled)
    assert len(dense[0]) == 3 and min(dense[0]) >= 2 * 50 * 4  # the statistics do travel
    found = run_ranks(broadcast_sizes, 2, pruned, forward_first, is_compiled)
    for before, after in zip(dense, found, strict=True):
        assert after[1:] == before[1:]  # the first forward tells DDP


def kept_between_forward_and_backward(wrapping: str, pruned: bool, bf16: bool) -> int:
    """Bytes of all storages that autograd saved in forward and that still exist after it."""
    dtype = torch.bfloat16 if bf16 else None
    if wrappings.kind_of(wrapping).startswith("fsdp1"):
        policy = {"mixed_precision": MixedPrecision(param_dtype=dtype)}
    else:
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    model = seeded(Net((64, 128, 64, 8)))
    model = wrappings.wrap(model, wrapping, **policy)
    if pruned:
        prune_weights(model)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    for _ in range(2):  # the first forward also sets FSDP up
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model(torch.ones(2, 64))
        storages = {wrappings.local(t).untyped_storage() for t in saved}
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        out.float().sum().backward()
    return sum(sizes.values())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "wrapping", ["fsdp2-2", "fsdp2-3", "fsdp2_root-2", "hsdp-2x2", "fsdp1-2", "fsdp1_flat-3"]
)
def test_fsdp_frees_as_much_after_forward_as_without_masks(wrapping, bf16):
    size = wrappings.world_size(wrapping)
    dense = run_ranks(kept_between_forward_and_backward, size, wrapping, False, bf16)
    assert run_ranks(kept_between_forward_and_backward, size, wrapping, True, bf16) == dense
    if wrappings.kind_of(wrapping) in ("fsdp1", "fsdp2"):  # less than one layer
        assert max(dense) < 64 * 128 * (2 if bf16 else 4)


# A forward of a pruned model launches the kernels of the dense one, and a product per mask.


SIZES = (8, 16, 16, 8)  # that no rank has to pad


class Kernels(TorchDispatchMode):
    """Counts the operations that run on elements: no views, and no memory that is only taken."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        is_view = any(argument.alias_info is not None for argument in func._schema.arguments)
        writes = func._schema.is_mutable
        if (writes or not is_view) and "empty" not in name and func.namespace == "aten":
            self.counts[name] += 1
        return result


def kernels_of_forward(wrapping: str, is_pruned: bool) -> dict[str, int]:
    model = wrappings.wrap(seeded(Net(SIZES)), wrapping)
    if is_pruned:
        prune_weights(model)
    x = torch.ones(4, 8)
    model(x).sum().backward()  # the first one sets wrappers up
    with Kernels() as kernels:
        model(x)
    return dict(kernels.counts)


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2-2", "tp-2", "fsdp2_tp-2x2"])
def test_a_product_per_mask_is_all_that_is_added(wrapping):
    size = wrappings.world_size(wrapping)
    dense = run_ranks(kernels_of_forward, size, wrapping, False)
    pruned = run_ranks(kernels_of_forward, size, wrapping, True)
    for of_dense, of_pruned in zip(dense, pruned, strict=True):
        added = Counter(of_pruned) - Counter(of_dense)
        assert added in ({"mul": 3}, {"masked_fill_": 3}, {})


# torch.compile: a pruned model breaks no graph that the dense one does not.


WRAPPINGS = ["plain-1", "ddp-2", "fsdp2-2", "fsdp2_root-2", "tp-2", "fsdp2_tp-1x2"]
NUM_PRUNINGS = 3


def graphs(wrapping: str) -> list[tuple[str, int, list[int]]]:
    """Graph breaks, and the number of graphs after each step: dense, pruned, pruned each time."""
    from torch._dynamo.utils import counters

    results = []
    for how in ("dense", "pruned", "pruned again"):
        torch._dynamo.reset()
        counters.clear()
        model = wrappings.wrap(seeded(Net(EVEN_HIDDEN)), wrapping)
        compiled = torch.compile(model, backend="eager")
        num_graphs = []
        for step in range(NUM_PRUNINGS):
            if how == "pruned again" or (how == "pruned" and step == 0):
                prune_weights(model, 0.2)
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
