"""Statistics of activations on every wrapper: bit for bit those of one process with all batches.

Activations are small integers, so that sums are exact in any order. A row is a net with its data;
what is made of the sums is compared too: scores, outlier ratios, masks, files and Gram matrices.
That one process is right is tested in tests/unit.
"""

import os
import re
import tempfile
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distprune as prune
from distprune import reconstruction
from distprune.statistics import ActivationStatistics, GramMatrices, prune_sequentially
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, raised, wrong_masks
from helpers.fused_experts import experts_net, integer_net, tokens_of
from helpers.least_squares import gram_of, reconstructed
from helpers.models import Net, seeded, target
from helpers.sampling import every

WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
WRAPPINGS = wrappings.sampled([*wrappings.ALL, *wrappings.FSDP2_DIM1])
SUM = ActivationStatistics


class ConvNet(nn.Module):
    """Convolutions with and without groups, and a weight that is [in, out]."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.l1 = nn.Conv2d(2, 6, 3, padding=1, stride=2)
        self.l2 = nn.Conv2d(6, 9, (2, 1), groups=3)
        self.depthwise = nn.Conv2d(9, 9, 1, groups=9, padding="same")
        self.l3 = Conv1D(5, 9)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).float()

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(torch.relu(self.l2(torch.relu(self.l1(x)))))
        return self.l3(torch.relu(x).flatten(2).mT.contiguous())


def rows_of(part: int, num_features: int, dtype: torch.dtype, has_empty: bool) -> list:
    """(input, mask) of one data-parallel rank: of another size on each rank, and one is empty.

    Padding holds what would be seen in the sums. Values are so small that bf16 has all activations.
    """
    generator = torch.Generator().manual_seed(10 + part)
    batches = []
    for number in range(3):
        is_empty = part == 1 and number == 0 and has_empty
        shape = (0 if is_empty else 1 + 2 * part + number, 3 + number)
        x = torch.randint(-2, 3, (*shape, num_features), generator=generator).to(dtype)
        mask = torch.rand(shape, generator=generator) < 0.7
        x[~mask] = 3
        batches.append((x, mask))
    return batches


def images_of(part: int) -> Tensor:
    generator = torch.Generator().manual_seed(part)
    return torch.randint(-1, 2, (1 + part, 2, 5, 4), generator=generator).float()


class Side:
    """A net, its parameters, and the batches that it sees: of a rank, or whole in one process."""

    def __init__(self, model: nn.Module, batches: list, group=None, **options) -> None:
        self.model, self.batches, self.options = model, batches, {"group": group, **options}
        names = ("weight", "gate_up_proj", "down_proj")
        # Among them the l1 before the experts.
        self.pairs = prune.select(wrappings.unwrapped(model), names=names, everything=True)

    def collect(self, statistics, is_masked: bool = False) -> None:
        with statistics.collecting():
            for x, mask in self.batches:
                if is_masked:
                    with statistics.batch(mask):
                        self.model(x)
                else:
                    self.model(x)

    def statistics(self, kind: type, is_masked: bool = False) -> ActivationStatistics:
        statistics = kind(self.pairs, **self.options)
        self.collect(statistics, is_masked)
        return statistics

    def prune(self, scores: dict, amount: float = 0.3) -> dict[str, int]:
        report = prune.global_unstructured(
            list(scores), prune.L1Unstructured, scores, amount=amount, **self.options
        )
        return {entry.name: entry.num_pruned for entry in report.parameters}


def sides_of(wrapping: str, net: str, dtype: torch.dtype = torch.float32) -> tuple:
    """The sharded side, the whole one, and the indices of what this rank holds."""
    part, num_parts = wrappings.data_rank(wrapping, are_replicas=False)
    is_tensor_parallel = wrappings.kind_of(wrapping) in ("tp", "fsdp2_tp")
    sizes = wrappings.runnable_sizes(wrapping)
    if net == "linear":
        made = [integer_net(sizes, dtype) for _ in range(3)]
        # DTensor cannot flatten a sharded tensor without rows.
        data = [rows_of(n, sizes[0], dtype, not is_tensor_parallel) for n in range(num_parts)]
    elif net == "convolutions":
        made = [ConvNet() for _ in range(3)]
        data = [[(images_of(n), None)] for n in range(num_parts)]
    else:
        made = [experts_net(net.partition(" ")[2], dtype) for _ in range(3)]
        data = [[(tokens_of(n, dtype=dtype), None)] for n in range(num_parts)]
    indices = wrappings.local_indices(made[0], wrapping)
    sharded = Side(wrappings.wrap(made[1], wrapping), data[part])
    everything = [batch for batches in data for batch in batches]
    whole = Side(made[2], everything, dist.new_subgroups(1)[0])
    return sharded, whole, indices


def totals_of(statistics: ActivationStatistics) -> dict:
    return {
        pair.fqn: (held.num_tokens, held.sums.tolist(), held.squares.tolist())
        for pair, held in statistics.totals().items()
    }


def facts_of(side: Side, statistics: ActivationStatistics, path: str | None) -> dict:
    """What is made of statistics by parameter, to be compared with ==; then side is pruned."""
    facts = {"totals": totals_of(statistics)}
    for name in ("wanda", "stade", "ria"):
        scores = getattr(statistics, name)()
        facts[name] = {pair.fqn: factors.checksum() for pair, factors in scores.items()}
    for per in ("parameter", "block"):
        ratios = statistics.outlier_ratios(threshold_multiple=1.5, per=per)
        facts[f"outliers by {per}"] = {pair.fqn: ratio for pair, ratio in ratios.items()}
    if isinstance(statistics, GramMatrices):
        facts["matrices"] = {pair.fqn: statistics.matrix(*pair).tolist() for pair in side.pairs}
    if path is not None:
        statistics.save(path)
        loaded = ActivationStatistics.load(path, side.pairs, **side.options)
        with open(path, "rb") as file:
            facts["file"] = file.read()
        dist.barrier()  # the next side writes it again
        side.collect(loaded)
        facts["continued"] = totals_of(loaded)
    facts["counts"] = side.prune(scores)
    return facts


def differences(wrapping: str, net: str, kind: type, is_masked: bool, dtype, folder: str) -> list:
    """Dense, and seen with the masks that come of it."""
    warnings.simplefilter("ignore")  # of an expert without tokens
    sharded, whole, indices = sides_of(wrapping, net, dtype)
    wrong = []
    for when in ("dense", "pruned"):
        found = []
        for number, side in enumerate((sharded, whole)):
            # The file of the ranks together, and one of this rank alone.
            own = f"-{dist.get_rank()}" * number
            path = f"{folder}/{net[:4]}{when}{own}" if kind is SUM else None
            found.append(facts_of(side, side.statistics(kind, is_masked), path))
        wrong += [
            f"{net}, {when}, {what}: {mine}, not {found[1][what]}"
            for what, mine in found[0].items()
            if mine != found[1][what]
        ]
    keeps = {n.removesuffix("_mask"): mask for n, mask in whole.model.named_buffers()}
    return wrong + wrong_masks(sharded.model, keeps, indices, net)


LINEAR = [(b, m, d) for b in (SUM, GramMatrices) for m in (0, 1) for d in ("float32", "bfloat16")]
OTHERS = ["convolutions", "experts eager", "experts grouped_mm"]
# torch cannot run convolutions of the first ones; the last one would put them into other units.
NO_OTHERS = ("tp", "fsdp2_tp", "fsdp2_dim1", "fsdp1_flat")


@wrappings.sharing_meshes
def all_differences(wrapping: str, number: int, folder: str) -> list[str]:
    wrong = []
    for kind, is_masked, dtype in every(8, LINEAR, number):
        dtype = getattr(torch, dtype)
        wrong += differences(wrapping, "linear", kind, bool(is_masked), dtype, folder)
    for net in () if wrappings.kind_of(wrapping) in NO_OTHERS else every(3, OTHERS, number):
        wrong += differences(wrapping, net, SUM, False, torch.float32, folder)
    return wrong


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_everything_is_that_of_one_process(wrapping, tmp_path):
    pytest.importorskip("transformers")
    assert_nothing_wrong_on(wrapping, all_differences, WRAPPINGS.index(wrapping), str(tmp_path))


def block_after_block(side: Side, names: list[str]) -> tuple[ActivationStatistics, list, list]:
    """Each block is pruned by the inputs that the blocks before it give, pruned already."""
    statistics, seen = ActivationStatistics(side.pairs, **side.options), []

    def prune_block(pairs):
        seen.append([pair.fqn for pair in pairs])
        return side.prune(statistics.wanda(pairs), 0.4)

    blocks = [wrappings.unwrapped(side.model).get_submodule(name) for name in names]
    batches = [x for x, _ in side.batches]
    counts = prune_sequentially(statistics, side.model, blocks, batches, prune_block)
    return statistics, seen, counts


def published(net: nn.Module, inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Masks, and mean squares of the inputs: block after block, replaying what the last one gave.

    Collect the inputs of the block while it is dense, prune it, run it again, and go on with what
    it then gives.
    """
    keeps, squares = [], []
    x = inputs.double()
    for name in WEIGHTS:
        layer = target(net, name)[0]
        squares.append(x.square().mean(0))
        scores = layer.weight.detach().abs() * squares[-1].sqrt().float()
        keeps += reference.prune([scores], 0.4)
        x = torch.relu(x @ (layer.weight * keeps[-1]).double().T + layer.bias.double())
    return keeps, squares


def sequential_differences(wrapping: str, net: str) -> list[str]:
    warnings.simplefilter("ignore")
    sharded, whole, indices = sides_of(wrapping, net)
    names = ["l1", "l2", "l3"] if net == "linear" else ["l1", "first", "second"]
    mine, seen, counts = block_after_block(sharded, names)
    right, *others = block_after_block(whole, names)
    wrong = [] if [seen, counts] == others else [f"{seen} {counts}, not {others}"]
    wrong += [] if totals_of(mine) == totals_of(right) else ["the sums"]
    keeps = {n.removesuffix("_mask"): mask for n, mask in whole.model.named_buffers()}
    if net == "linear":
        inputs = torch.cat([x.flatten(0, 1) for x, _ in whole.batches])
        sizes = wrappings.runnable_sizes(wrapping)
        masks, squares = published(integer_net(sizes), inputs)
        keeps = dict(zip(WEIGHTS, masks, strict=True))
        for totals, mean in zip(mine.totals().values(), squares, strict=True):
            if not torch.equal(totals.squares / totals.num_tokens, mean):
                wrong.append(f"{totals.squares / totals.num_tokens}, not {mean}")
    wrong += [] if mine.mode == "sequential" else [str(mine.mode)]
    return wrong + wrong_masks(sharded.model, keeps, indices)


@pytest.mark.parametrize(
    ("wrapping", "net"),
    [(w, "linear") for w in every(2, WRAPPINGS)] + [("ddp-2", OTHERS[2]), ("fsdp2-2", OTHERS[1])],
)
def test_block_after_block_as_published(wrapping, net):
    assert_nothing_wrong_on(wrapping, sequential_differences, net)


# Data that are rounded, and what least squares make of their Gram matrices.


def rounded_sides(wrapping: str, num_rows: int) -> tuple:
    """Rows that depend on each other, as many for each data-parallel rank."""
    part, num_parts = wrappings.data_rank(wrapping, are_replicas=False)
    sizes = wrappings.runnable_sizes(wrapping)
    made = [seeded(Net(sizes)) for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(sizes[0], sizes[0], generator=generator)
    data = torch.randn(num_parts, num_rows, sizes[0], generator=generator) @ mixing
    indices = wrappings.local_indices(made[0], wrapping)
    sharded = Side(wrappings.wrap(made[1], wrapping), [(data[part], None)])
    whole = Side(made[2], [(data.flatten(0, 1), None)], dist.new_subgroups(1)[0])
    return sharded, whole, indices


def rounded_differences(wrapping: str) -> list[str]:
    """Near those of one process, the same bits on all ranks, and weights of least squares."""
    sharded, whole, indices = rounded_sides(wrapping, 40)
    grams, right = (side.statistics(GramMatrices) for side in (sharded, whole))
    wrong = []
    for (pair, mine), (other, its) in zip(
        grams.totals().items(), right.totals().items(), strict=True
    ):
        matrices = grams.matrix(*pair), right.matrix(*other)
        pieces = [(mine.sums, its.sums), (mine.squares, its.squares), matrices]
        for found, expected in pieces:
            if (found - expected).abs().max() > 1e-6 * expected.abs().max():
                wrong.append(f"{pair.fqn}: {found.tolist()}, not {expected.tolist()}")
        of_all: list = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, [mine.sums.tolist(), mine.squares.tolist()])
        wrong += [f"{pair.fqn}: other bits"] * any(bits != of_all[0] for bits in of_all)
        factors = [g.obs([p])[p].terms[0][0] for g, p in ((grams, pair), (right, other))]
        if not torch.allclose(*factors, rtol=1e-4):
            wrong.append(f"{pair.fqn}: factors {factors}")
    num_rows = [block[0].shape[0] for _, block in grams.blocks()]
    if max(num_rows) > -(-max(wrappings.runnable_sizes(wrapping)[:3]) // dist.get_world_size()):
        wrong.append(f"this rank holds {num_rows} rows")
    return wrong + reconstruction_differences(sharded, whole, indices, grams)


def reconstruction_differences(
    sharded: Side, whole: Side, indices: dict, grams: GramMatrices
) -> list[str]:
    """Every layer's inputs are those of the dense model."""
    dense = {name: target(whole.model, name)[0].weight.detach().clone() for name in WEIGHTS}
    matrices, x = {}, whole.batches[0][0]
    for name in WEIGHTS:
        matrices[name] = gram_of(x)
        layer = target(whole.model, name)[0]
        x = (torch.relu if name == "l1.weight" else torch.tanh)(layer(x)).detach()
    keeps = reference.prune(list(dense.values()), 0.5)
    with prune.keep_pruned_values():
        prune.global_unstructured(sharded.pairs, prune.L1Unstructured, amount=0.5)
        report = prune.reconstruct(sharded.pairs, grams, damping=0.01, steps=60)
    wrong = wrong_masks(sharded.model, dict(zip(WEIGHTS, keeps, strict=True)), indices)
    for (name, weight), keep, entry in zip(dense.items(), keeps, report.parameters, strict=True):
        right = reconstructed(weight, keep, matrices[name], 0.01)
        own = wrappings.shard(sharded.model, name, indices).double().view(-1)
        new = wrappings.my_part(right, indices[name]).view(-1)
        pruned = own[~wrappings.my_part(keep, indices[name]).view(-1)]
        if len(own) and (own - new).abs().max() > 1e-5 * right.abs().max():
            wrong.append(f"{name}: {own.tolist()}, not {new.tolist()}")
        if pruned.any() or pruned.signbit().any():
            wrong.append(f"{name}: pruned elements are not +0")
        if not 0 < entry.error_after < entry.error_before < 1:
            wrong.append(f"{name}: {entry}")
    return wrong + list(map(str, prune.verify(sharded.model).problems))


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_rounded_sums_and_reconstructed_weights(wrapping):
    assert_nothing_wrong_on(wrapping, rounded_differences)


def values_after_an_error(wrapping: str) -> list[str]:
    """One rank fails in the last layer: every rank raises, and every parameter is as it was."""
    sharded, _, indices = rounded_sides(wrapping, 4)
    grams, calls = sharded.statistics(GramMatrices), []
    right = reconstruction.least_squares

    def fails(*arguments):
        calls.append(arguments)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise MemoryError("no memory")
        return right(*arguments)

    with prune.keep_pruned_values():
        prune.global_unstructured(sharded.pairs, prune.L1Unstructured, amount=0.5)
        before = [wrappings.shard(sharded.model, n, indices).clone() for n in WEIGHTS]
        with (
            mock.patch.object(reconstruction, "least_squares", fails),
            pytest.raises(MemoryError, match="no memory"),
        ):
            prune.reconstruct(sharded.pairs, grams)
        after = [wrappings.shard(sharded.model, n, indices).clone() for n in WEIGHTS]
    pairs = zip(WEIGHTS, before, after, strict=True)
    return [f"{name} has changed" for name, old, new in pairs if not torch.equal(old, new)]


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp2-2", "ddp-2"])
def test_an_error_on_one_rank_changes_nothing(wrapping):
    assert_nothing_wrong_on(wrapping, values_after_an_error)


# Inputs that lie on ranks in another way.


def sequence_parallel_differences(dim: int) -> list[str]:
    """Sharded tokens all count: gathered for l1, as they are for l3, whose weight is replicated.

    Args:
        dim: that is sharded: 0 of [tokens, features], or 1 of [batch, tokens, features].
    """
    size, sizes = dist.get_world_size(), (6, 12, 4, 3)
    mesh = init_device_mesh("cpu", (size,))
    net = integer_net(sizes)
    plan = {
        "l1": ColwiseParallel(input_layouts=Shard(dim)),
        "l2": RowwiseParallel(output_layouts=Shard(dim), use_local_output=False),
    }
    parallelize_module(net, mesh, plan)
    distribute_module(net.l3, mesh)
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-2, 3, (2, 4 * size, 6), generator=generator).float()
    mask = torch.rand(x.shape[:-1], generator=generator) < 0.6
    part = distribute_tensor(x if dim else x.flatten(0, 1), mesh, [Shard(dim)]).to_local()
    whole = Side(integer_net(sizes), [(x, mask)], dist.new_subgroups(1)[0])
    wrong = []
    for is_masked in (False, True):
        found = totals_of(Side(net, [(part, mask)]).statistics(SUM, is_masked))
        expected = totals_of(whole.statistics(SUM, is_masked))
        wrong += [] if found == expected else [f"masked={is_masked}: {found}, not {expected}"]
    return wrong


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_tokens_that_are_sharded_over_tensor_parallel_ranks_all_count(size, dim):
    if dim == 1 and torch.__version__ < (2, 13):
        pytest.skip("this torch cannot flatten a DTensor whose tokens are sharded")
    assert_nothing_wrong(run_ranks(sequence_parallel_differences, size, dim))


def error_of_different_inputs(is_plain: bool) -> str:
    model = wrappings.wrap(integer_net((6, 12, 5, 3)), "tp-2")
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    if is_plain:
        for module in model.modules():
            module._forward_pre_hooks.clear()  # which make a DTensor of it
        model = nn.ModuleDict({"l1": model.l1})
        model.forward = lambda x: model["l1"](x)
    with pytest.raises(ValueError) as error, implicit_replication():
        Side(model, [(x, None)]).statistics(SUM).totals()
    return str(error.value)


@pytest.mark.parametrize("is_plain", [False, True])
def test_tensor_parallel_ranks_with_different_inputs_are_told_so(is_plain):
    for text in run_ranks(error_of_different_inputs, 2, is_plain):
        assert re.search(r"l1\.weight: ranks of one tensor-parallel group", text), text


def totals_with_an_idle_rank(wrapping: str) -> tuple[dict, int]:
    """Rank 1 has no batch: no forward at all. What is sent are the sums and agreements on them."""
    model = wrappings.wrap(nn.Sequential(nn.Linear(2, 2)), wrapping)
    batches = [(torch.ones(3, 2), None)] * (0 if dist.get_rank() == 1 else 2)
    with Traffic() as traffic:
        found = totals_of(Side(model, batches).statistics(SUM))
    return found, traffic.num_bytes


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-3"])
def test_a_rank_without_a_batch_takes_part(wrapping):
    size = wrappings.world_size(wrapping)
    num = 6 * (size - 1)
    expected = {"0.weight": (num, [float(num)] * 2, [float(num)] * 2)}
    for found, num_bytes in run_ranks(totals_with_an_idle_rank, size, wrapping):
        assert found == expected and num_bytes < 400


def experts_differences(implementation: str, is_sharded: bool) -> list[str]:
    """Weights that are gathered in another dtype, layer by layer and with the experts on their own;

    or whole experts: ranks of a tensor-parallel group have the same tokens, and one counts.
    """
    warnings.simplefilter("ignore")
    model, mesh = experts_net(implementation), init_device_mesh("cpu", (2,))
    parts = [(tokens_of(part), None) for part in range(2)]
    mine = [parts[dist.get_rank()]] if is_sharded else parts
    if is_sharded:
        for layer in (model.first, model):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    else:
        plan = {"l1": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh, plan)
    whole = Side(experts_net(), parts, dist.new_subgroups(1)[0])
    found, expected = (totals_of(side.statistics(SUM)) for side in (Side(model, mine), whole))
    return [] if found == expected else [f"{found}, not {expected}"]


@pytest.mark.parametrize(
    ("implementation", "is_sharded"), [("eager", True), ("grouped_mm", True), ("eager", False)]
)
def test_experts_in_mixed_precision_and_beside_tensor_parallelism(implementation, is_sharded):
    assert_nothing_wrong(run_ranks(experts_differences, 2, implementation, is_sharded))


def spread_experts() -> tuple[str, int]:
    """What is said of experts whose weights are DTensors while they run."""
    model = experts_net()
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(model.first.down_proj.data, mesh, [Shard(0)]))
    model.first.down_proj = weight
    with pytest.raises(NotImplementedError) as error:
        Side(model, [(tokens_of(1), None)]).statistics(SUM)
    return str(error.value), sum(len(module._forward_hooks) for module in model.modules())


def test_experts_that_are_spread_over_ranks_are_refused_by_name():
    for text, num_hooks in run_ranks(spread_experts, 2):
        assert text.startswith("first.down_proj: ") and "DTensor" in text and num_hooks == 0


def results_of_dtensor_images(dim: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    model = distribute_module(nn.Sequential(nn.Conv2d(2, 2, 1)), mesh)
    image = distribute_tensor(torch.ones(2, 2, 4, 4), mesh, [Shard(dim)])
    try:
        ((num_tokens, sums, _),) = totals_of(Side(model, [(image, None)]).statistics(SUM)).values()
        return f"{num_tokens} {torch.tensor(sums).flatten().tolist()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("dim", "expected"),
    [(0, "32 [32.0, 32.0]"), (1, "to have 2 channels"), (2, "by channels or by places")],
)
def test_images_that_are_sharded(dim, expected):
    """Samples of different ranks all count; a part of an image is refused."""
    for result in run_ranks(results_of_dtensor_images, 2, dim):
        assert expected in result


def totals_on_two_axes() -> list[dict]:
    """DTensor inputs on two axes of a mesh: tokens over one, features or copies over the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.arange(12.0).view(4, 3)
    found = []
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(1), Shard(0)]):
        layer = distribute_module(nn.Linear(3, 2), mesh)
        side = Side(nn.Sequential(layer), [(distribute_tensor(x, mesh, placements), None)])
        found.append(totals_of(side.statistics(SUM)))
    return found


def test_inputs_on_a_mesh_of_two_axes():
    x = torch.arange(12.0).view(4, 3)
    expected = {"0.weight": (4, x.sum(0).tolist(), x.square().sum(0).tolist())}
    for found in run_ranks(totals_on_two_axes, 4):
        assert found == [expected] * 3


# Ranks that hold different parameters (stages, experts), and errors of one rank.


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


def wrong_on_stages(folder: str) -> list[str]:
    """Two stages, each on two data-parallel ranks: sums, scores, masks and file of one process."""
    number, part = divmod(dist.get_rank(), 2)
    net, whole_net = (integer_net((6, 10, 5, 3), largest=2) for _ in range(2))
    data = [rows_of(of_part, 6, torch.float32, False) for of_part in range(2)]
    mine = [(torch.relu(net.l1(x)) if number else x, None) for x, _ in data[part]]
    stage = Side(Stage(net, [["l1"], ["l2", "l3"]][number]), mine, pipeline_parallel=True)
    whole = Side(whole_net, data[0] + data[1], dist.new_subgroups(1)[0])
    statistics = stage.statistics(SUM)
    wrong = [] if set(statistics.num_tokens()) == set(WEIGHTS) else [f"{statistics.num_tokens()}"]
    right = facts_of(whole, whole.statistics(SUM), f"{folder}/{dist.get_rank()}")
    for what, found in facts_of(stage, statistics, f"{folder}/together").items():
        expected = right[what]
        if isinstance(found, dict):
            expected = {name: expected[name] for name in found}
        if not found or found != expected:
            wrong.append(f"{what}: {found}, not {expected}")
    keeps = dict(whole_net.named_buffers())
    masks = dict(stage.model.named_buffers())
    return wrong + [name for name, mask in masks.items() if not torch.equal(mask, keeps[name])]


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


def errors_on_ranks(folder: str) -> list[str]:
    """What only one rank does wrong is an error on all, and nobody hangs."""
    rank = dist.get_rank()
    model = integer_net((6, 12, 5, 3))
    texts = []

    def attempt(step) -> None:
        texts.append(raised(step))

    attempt(lambda: ActivationStatistics(prune.select(model)[rank:]))
    bias = prune.select(model, names="bias", everything=True)
    attempt(lambda: ActivationStatistics(bias if rank else prune.select(model)))
    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        if rank:
            model(torch.full((2, 6), float("nan")))
    attempt(statistics.wanda)
    data = rows_of(rank, 6, torch.float32, False)
    statistics = Side(model, data).statistics(SUM)
    path = os.path.join(folder if rank else os.devnull, "a.safetensors")
    attempt(lambda: statistics.save(path))
    attempt(
        lambda: statistics.totals(prune.select(model) if rank else [(nn.Linear(2, 2), "weight")])
    )
    alone = dist.new_subgroups(1)[0]
    with tempfile.TemporaryDirectory() as own:
        path = os.path.join(own, "a.safetensors")
        Side(model, data, alone).statistics(SUM).save(path)
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


# Sequential pruning on one process: what it takes, and what it refuses.


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = x + layer(x)
        return x


def sequential(model, batches, blocks=None, prune_block=len, **options):
    statistics = ActivationStatistics(prune.select(model))
    blocks = model.layers if blocks is None else blocks
    return statistics, prune_sequentially(
        statistics, model, blocks, batches, prune_block, **options
    )


def test_batches_may_be_tensors_tuples_or_mappings_with_a_mask():
    model, x = Decoder(), torch.ones(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batches = [x, (x,), {"x": x, "attention_mask": mask}, {"x": x, "attention_mask": None}]
    statistics, results = sequential(model, batches)
    assert results == [1, 1, 1]
    assert statistics.num_tokens() == {f"layers.{i}.0.weight": 3 * 6 + 3 for i in range(3)}
    statistics, _ = sequential(model, [x], run=lambda _, batch: model(batch[:1]))
    assert set(statistics.num_tokens().values()) == {3}


def test_statistics_of_one_pass_do_not_mix_with_sequential_ones():
    model, x = Decoder(), torch.ones(2, 4)
    statistics, _ = sequential(model, [x])
    for call in (
        lambda: prune_sequentially(statistics, model, model.layers, [x], len),
        lambda: statistics.collecting().__enter__(),
    ):
        with pytest.raises(RuntimeError, match=r"sequential|collected already"):
            call()
    one_pass = ActivationStatistics(prune.select(model))
    with one_pass.collecting():
        model(x)
    assert one_pass.mode == "one_pass"
    with pytest.raises(RuntimeError, match="collected already"):
        prune_sequentially(one_pass, model, model.layers, [x], len)


def test_mistakes_are_named_before_anything_runs():
    model, x = Decoder(), torch.ones(2, 4)
    with pytest.raises(TypeError, match="batches is a generator"):
        sequential(model, (batch for batch in [x]))
    with pytest.raises(ValueError, match=r"layers\.2\.0\.weight is in no block"):
        sequential(model, [x], model.layers[:2])
    with pytest.raises(ValueError, match=r"layers\.0\.0\.weight is in blocks \[0, 3\]"):
        sequential(model, [x], [*model.layers, model.layers[0]])


def test_an_error_leaves_no_hooks():
    model, x = Decoder(), torch.ones(2, 4)
    with pytest.raises(ZeroDivisionError):
        sequential(model, [x], prune_block=lambda parameters: 1 // 0)
    assert not any(module._forward_pre_hooks for module in model.modules())
