"""Activation statistics on every wrapper: exactly those of one process that runs all batches."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import distprune as prune
from distprune.statistics import ActivationStatistics
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.integer_nets import integer_net
from helpers.models import Net
from helpers.sampling import every

LAYERS = ["l1.weight", "l2.weight", "l3.weight"]
ALL = wrappings.sampled([*wrappings.ALL, *wrappings.FSDP2_DIM1])


def batches_of(
    part: int, num_batches: int, num_features: int, dtype: torch.dtype, has_empty: bool = True
) -> list:
    """(input, mask) of one data-parallel rank: of another size on each rank, and one is empty.

    Padding holds what would be seen in the sums. Values are so small that bf16 has all activations.
    """
    generator = torch.Generator().manual_seed(10 + part)
    batches = []
    for number in range(num_batches):
        is_empty = part == 1 and number == 0 and has_empty
        shape = (0 if is_empty else 1 + 2 * part + number, 3 + number)
        x = torch.randint(-2, 3, (*shape, num_features), generator=generator).to(dtype)
        mask = torch.rand(shape, generator=generator) < 0.7
        x[~mask] = 3
        batches.append((x, mask))
    return batches


def parts_of(wrapping: str) -> tuple[int, int]:
    """The data-parallel rank and their number. Ranks with a plain model have different data."""
    if wrappings.kind_of(wrapping) == "plain":
        return dist.get_rank(), dist.get_world_size()
    return wrappings.data_rank(wrapping)


def expected(
    net: nn.Module, parts: list[list], is_masked: bool
) -> dict[str, tuple[int, Tensor, Tensor]]:
    """(tokens, sums, sums of squares) of each layer, from the batches of all parts, row by row."""
    rows = []
    for batches in parts:
        for x, mask in batches:
            rows += list(x[mask] if is_masked else x.flatten(0, 1))
    result = {}
    with torch.no_grad():
        inputs = torch.stack(rows).double()
        for name in ("l1", "l2", "l3"):
            result[f"{name}.weight"] = (len(rows), inputs.sum(0), (inputs * inputs).sum(0))
            layer = net.get_submodule(name).double()
            inputs = torch.relu(inputs @ layer.weight.T + layer.bias)
    return result


def collect(
    model: nn.Module, statistics: ActivationStatistics, batches: list, is_masked: bool
) -> None:
    with statistics.collecting():
        for x, mask in batches:
            if is_masked:
                with statistics.batch(mask):
                    model(x)
            else:
                model(x)


def differences(wrapping: str, num_batches: int, is_masked: bool, dtype: torch.dtype) -> list[str]:
    sizes = wrappings.runnable_sizes(wrapping)
    model = wrappings.wrap(integer_net(sizes, dtype), wrapping)
    part, num_parts = parts_of(wrapping)
    statistics = ActivationStatistics(prune.select(model))
    # DTensor cannot flatten a sharded tensor without rows.
    has_empty = wrappings.kind_of(wrapping) not in ("tp", "fsdp2_tp")
    parts = [
        batches_of(number, num_batches, sizes[0], dtype, has_empty) for number in range(num_parts)
    ]
    collect(model, statistics, parts[part], is_masked)
    found = statistics.totals()
    wrong = []
    reference = expected(integer_net(sizes, dtype), parts, is_masked)
    for pair in prune.select(model):
        num_tokens, sums, squares = reference[pair.fqn]
        held = found[pair]
        if held.num_tokens != num_tokens:
            wrong.append(f"{pair.fqn}: {held.num_tokens} tokens, not {num_tokens}")
        for what, mine, right in (("x", held.sums, sums), ("x**2", held.squares, squares)):
            if not torch.equal(mine, right):
                wrong.append(f"{pair.fqn}: sums of {what} {mine.tolist()}, not {right.tolist()}")
    return wrong


CASES = [(b, m, d) for b in (1, 3) for m in (False, True) for d in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    ("wrapping", "case"),
    [(w, case) for i, w in enumerate(ALL) for case in every(4, CASES, start=i)],
)
def test_the_sums_are_those_of_one_process(wrapping, case):
    assert_nothing_wrong_on(wrapping, differences, *case)


def of_normal_data(kind: type, wrapping: str, num_rows: int) -> tuple:
    """Statistics of some rows per rank, their parameters, and both of one process with all rows."""
    sizes = wrappings.runnable_sizes(wrapping)
    torch.manual_seed(3)
    net = Net(sizes)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    model = wrappings.wrap(net, wrapping)
    part, num_parts = parts_of(wrapping)
    data = torch.randn(num_parts, num_rows, sizes[0])
    statistics = kind(prune.select(model))
    with statistics.collecting():
        model(data[part])
    single = Net(sizes)
    single.load_state_dict(state)
    reference = kind(prune.select(single), group=dist.new_subgroups(1)[0])
    with reference.collecting():
        single(data.flatten(0, 1))
    return statistics, prune.select(model), reference, prune.select(single)


def wrong_with_normal_data(wrapping: str) -> list[str]:
    """Rounded activations: within 1e-6 of one process, and the same bits on all ranks."""
    statistics, _, reference, _ = of_normal_data(ActivationStatistics, wrapping, 5)
    wrong = []
    for mine, right in zip(statistics.totals().values(), reference.totals().values(), strict=True):
        for a, b in ((mine.sums, right.sums), (mine.squares, right.squares)):
            if not torch.allclose(a, b, rtol=1e-6, atol=1e-6):
                wrong.append(f"{a.tolist()}, not {b.tolist()}")
            of_all = [torch.empty_like(a) for _ in range(dist.get_world_size())]
            dist.all_gather(of_all, a.contiguous())
            if not all(torch.equal(of_all[0], other) for other in of_all):
                wrong.append("ranks have different bits")
    return wrong


@pytest.mark.parametrize("wrapping", every(3, ALL, start=1))
def test_rounded_sums_are_near_and_bit_equal_on_all_ranks(wrapping):
    assert_nothing_wrong_on(wrapping, wrong_with_normal_data)


def wrong_in_sequence_parallel(dim: int) -> list[str]:
    """Sharded tokens all count: gathered for l1, as they are for l3, whose weight is replicated.

    Args:
        dim: that is sharded: 0 of [tokens, features], or 1 of [batch, tokens, features].
    """
    size, sizes = dist.get_world_size(), (6, 12, 4, 3)
    mesh = init_device_mesh("cpu", (size,))
    net = integer_net(sizes, torch.float32)
    plan = {
        "l1": ColwiseParallel(input_layouts=Shard(dim)),
        "l2": RowwiseParallel(output_layouts=Shard(dim), use_local_output=False),
    }
    parallelize_module(net, mesh, plan)
    distribute_module(net.l3, mesh)
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-2, 3, (2, 4 * size, 6), generator=generator).float()
    mask = torch.rand(x.shape[:-1], generator=generator) < 0.6
    wrong = []
    for is_masked in (False, True):
        statistics = ActivationStatistics(prune.select(net))
        whole = x if dim else x.flatten(0, 1)
        part = distribute_tensor(whole, mesh, [Shard(dim)]).to_local()
        with statistics.collecting():
            if is_masked:
                with statistics.batch(mask):
                    net(part)
            else:
                net(part)
        reference = expected(integer_net(sizes, torch.float32), [[(x, mask)]], is_masked)
        for pair, held in statistics.totals().items():
            num_tokens, sums, squares = reference[pair.fqn]
            if held.num_tokens != num_tokens or not torch.equal(held.squares, squares):
                wrong.append(f"{pair.fqn} masked={is_masked}: {held}, not {reference[pair.fqn]}")
            if not torch.equal(held.sums, sums):
                wrong.append(f"{pair.fqn}: {held.sums}")
    return wrong


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_tokens_that_are_sharded_over_tensor_parallel_ranks_all_count(size, dim):
    if dim == 1 and torch.__version__ < (2, 13):
        pytest.skip("this torch cannot flatten a DTensor whose tokens are sharded")
    assert_nothing_wrong(run_ranks(wrong_in_sequence_parallel, size, dim))


def error_of(wrapping: str, fault: str) -> str:
    sizes = wrappings.runnable_sizes(wrapping)
    model = wrappings.wrap(integer_net(sizes, torch.float32), wrapping)
    statistics = ActivationStatistics(prune.select(model))
    seed = dist.get_rank()
    x = torch.randn(2, sizes[0], generator=torch.Generator().manual_seed(seed))
    plain = contextlib.nullcontext()
    if fault == "different plain batches":
        plain = implicit_replication()
        for module in model.modules():
            module._forward_pre_hooks.clear()  # which make a DTensor of it
        model = model.l1
    try:
        with plain, statistics.collecting():
            model(x)
        statistics.totals()
    except Exception as error:
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        return f"{type(error).__name__}: {error} {sum(hooks)} hooks"
    return "nothing"


@pytest.mark.parametrize("fault", ["different batches", "different plain batches"])
def test_tensor_parallel_ranks_with_different_inputs_are_told_so(fault):
    for text in run_ranks(error_of, 2, "tp-2", fault):
        assert re.search(r"ValueError: .*l1\.weight: ranks of one tensor-parallel group", text), (
            text
        )


def traffic(wrapping: str) -> tuple[dict[str, int], int]:
    """Bytes of each way to ask, and the number of inputs and outputs of all layers."""
    sizes = wrappings.runnable_sizes(wrapping)
    model = wrappings.wrap(integer_net(sizes, largest=2), wrapping)
    data = torch.ones(2, sizes[0])
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
        new = 8 * (2 * num_inputs + 3 * 3 + 1)
        assert sent["wanda"] == flags + new
        assert sent["stade"] == flags  # nothing is new
        others = sent["ria"] - flags - 2 * 8 * (num_inputs + num_outputs + 1)
        assert 0 < others <= 40 + 3 * 8 * 10  # the parameters are read again and compared
