"""Layouts that distprune does not make itself: ten steps are those of one process.

Some are registered, and stand for wrappers that need GPUs. ``Flat`` stores and updates parameters
as Megatron's distributed optimizer does: every rank has all of a low-precision buffer, and an fp32
slice of it, cut without regard to parameters, which its optimizer steps. ``Ragged`` stores runs of
unequal lengths, as veScale's RaggedShard and torchtitan's flex_shard do.

Others are torchtitan's. It shards experts on a mesh (efsdp, ep) and all else on (fsdp,), in one
group of FSDP2 or in two; experts are cut along dimension 1 where there are more ranks than experts.
Its SimpleFSDP gathers parameters in properties of the modules.
"""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.placement_types import _StridedShard

import distprune as prune
from distprune import layouts
from distprune.base.blocks import WeightLayout
from distprune.criteria import SNIP, Fisher
from distprune.reconstruction import positions_of
from distprune.shards.reader import ShardReader
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong, other_errors, outcome
from helpers.wrappings import local
from helpers.wrong_steps import NUM_STEPS, wrong_steps

SIZES = (6, 7, 4)
LEARNING_RATE = 0.05


# Registered ones.


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(SIZES[0], SIZES[1], bias=False), nn.Linear(SIZES[1], SIZES[2], bias=False)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


class Flat:
    """Whole parameters in one buffer; this rank's slice of it in fp32, with SGD and momentum."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.places = [
            (module, "weight") for module in model.modules() if type(module) is nn.Linear
        ]
        sizes = [module._parameters[name].numel() for module, name in self.places]
        self.chunk = -(-sum(sizes) // dist.get_world_size())
        padded = self.chunk * dist.get_world_size()
        self.buffer = torch.zeros(padded, dtype=dtype)
        self.starts = torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()
        for (module, name), start in zip(self.places, self.starts, strict=True):
            parameter = module._parameters[name]
            view = self.buffer[start : start + parameter.numel()].view(parameter.shape)
            parameter.data = view.copy_(parameter.data)
        self.mine = slice(dist.get_rank() * self.chunk, (dist.get_rank() + 1) * self.chunk)
        self.master = nn.Parameter(self.buffer[self.mine].float())
        self.optimizer = torch.optim.SGD([self.master], LEARNING_RATE, momentum=0.9)
        self.parameters = [module._parameters[name] for module, name in self.places]

    def find(self, module: nn.Module, name: str):
        for number, parameter in enumerate(self.parameters):
            if module._parameters.get(name) is parameter:
                return FlatRun(self, number)
        return None

    def step(self, loss: Tensor) -> None:
        loss.backward()
        gradient = torch.zeros(len(self.buffer))
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            gradient[start : start + parameter.numel()] = parameter.grad.view(-1)
            parameter.grad = None
        dist.all_reduce(gradient)
        self.master.grad = gradient[self.mine] / dist.get_world_size()
        self.optimizer.step()
        self.buffer[self.mine] = self.master.detach().to(self.buffer.dtype)
        self.gather()

    def gather(self) -> None:
        parts = [torch.empty_like(self.buffer[self.mine]) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.buffer[self.mine].clone())
        self.buffer.copy_(torch.cat(parts))


class FlatRun(layouts.StoredRun):
    is_whole_in_backward = True
    shape = property(lambda self: self.parameter.shape)
    groups = property(lambda self: [dist.group.WORLD])

    def __init__(self, flat: Flat, number: int) -> None:
        self.flat, self.number, self.parameter = flat, number, flat.parameters[number]

    @property
    def owners(self):
        module, _ = self.flat.places[self.number]
        return [(module, n) for n, p in module._parameters.items() if p is self.parameter]

    @property
    def runs(self):
        start, size, chunk = self.flat.starts[self.number], self.shape.numel(), self.flat.chunk
        edges = [rank * chunk - start for rank in range(dist.get_world_size() + 1)]
        edges = [min(max(edge, 0), size) for edge in edges]
        return [(a, b - a) for a, b in itertools.pairwise(edges)]

    @property
    def values(self):
        start, size = self.runs[dist.get_rank()]
        return self.parameter.detach().view(-1)[start : start + size]

    @property
    def masters(self):
        start, size = self.runs[dist.get_rank()]
        first = self.flat.starts[self.number] + start - dist.get_rank() * self.flat.chunk
        return [self.flat.master.detach()[max(first, 0) : max(first, 0) + size]]

    def gather_again(self):
        self.flat.gather()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine: Tensor, sizes: list[int], shape: torch.Size) -> Tensor:
        ctx.sizes = sizes
        parts = [torch.zeros(max(sizes)) for _ in sizes]
        padded = torch.zeros(max(sizes))
        padded[: mine.numel()] = mine
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]).view(shape)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        part = gradient.view(-1).split(ctx.sizes)[dist.get_rank()]
        return part / dist.get_world_size(), None, None


def unequal(shape: torch.Size) -> list[int]:
    """Rank r has about r + 1 times as much as rank 0, and the last but one has nothing."""
    size, shares = dist.get_world_size(), list(range(1, dist.get_world_size() + 1))
    if size > 2:
        shares[-2] = 0
    return [shape.numel() * sum(shares[:r]) // sum(shares) for r in range(size + 1)]


class RaggedLinear(nn.Module):
    def __init__(self, dense: Tensor, edges: list[int]) -> None:
        super().__init__()
        self.sizes = [b - a for a, b in itertools.pairwise(edges)]
        self.shape = dense.shape
        run = dense.detach().view(-1)[edges[dist.get_rank()] : edges[dist.get_rank() + 1]]
        self.weight = nn.Parameter(run.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ Gather.apply(self.weight, self.sizes, self.shape).T


class RaggedRun(layouts.StoredRun):
    shape = property(lambda self: self.module.shape)
    groups = property(lambda self: [dist.group.WORLD])
    values = property(lambda self: self.parameter.detach())

    def __init__(self, module: RaggedLinear, name: str) -> None:
        self.module, self.name = module, name
        self.parameter = module._parameters[name]

    @property
    def owners(self):
        return [(self.module, n) for n, p in self.module._parameters.items() if p is not None]

    @property
    def runs(self):
        sizes = self.module.sizes
        return [(sum(sizes[:rank]), size) for rank, size in enumerate(sizes)]


def find_ragged(module: nn.Module, name: str):
    return RaggedRun(module, name) if isinstance(module, RaggedLinear) else None


class Wrapped:
    """A model in one of the layouts, and how it is stepped."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.finder = net(), find_ragged
        if kind == "ragged":
            for number in (0, 2):
                weight = self.model[number].weight
                self.model[number] = RaggedLinear(weight, unequal(weight.shape))
            self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE, momentum=0.9)
        else:
            self.model = self.model.to(dtype)
            self.flat = Flat(self.model, dtype)
            self.finder = self.flat.find
        self.kind, self.dtype = kind, dtype
        layouts.register(self.finder)

    def step(self, batch: Tensor) -> None:
        loss = self.model(batch.to(self.dtype)).float().square().mean()
        if self.kind == "flat":
            self.flat.step(loss)
            return
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run_of(self, number: int) -> layouts.StoredRun:
        return self.finder(self.model[number], next(iter(self.model[number]._parameters)))

    def mine(self, number: int, whole: Tensor) -> Tensor:
        start, size = self.run_of(number).runs[dist.get_rank()]
        return whole.detach().reshape(-1)[start : start + size]


def batches(rank: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(NUM_STEPS, dist.get_world_size(), 2, SIZES[0], generator=generator)
    return list(whole.flatten(1, 2) if rank is None else whole[:, rank])


def train_as_one_process(kind: str) -> list[str]:
    wrapped, dense = Wrapped(kind), net()
    optimizer = torch.optim.SGD(dense.parameters(), LEARNING_RATE, momentum=0.9)
    own, whole = batches(dist.get_rank()), batches()

    def step_of_one(number: int) -> None:
        optimizer.zero_grad()
        dense(whole[number]).square().mean().backward()
        optimizer.step()

    try:
        places, of_dense = (
            [(model[n], "weight") for n in (0, 2)] for model in (wrapped.model, dense)
        )
        return wrong_steps(
            places, of_dense,
            lambda i, tensor: wrapped.mine(2 * i, tensor),
            lambda i: wrapped.run_of(2 * i).values,
            lambda number: wrapped.step(own[number]), step_of_one,
        )  # fmt: skip
    finally:
        layouts.unregister(wrapped.finder)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["flat", "ragged"])
def test_a_registered_layout_trains_as_one_process(kind, world_size):
    assert_nothing_wrong(run_ranks(train_as_one_process, world_size, kind))


def low_precision(kind: str) -> list[str]:
    """The working copy is ranked, kept masters do not change, and both are zero where pruned."""
    wrapped = Wrapped(kind, torch.bfloat16)
    try:
        wrapped.step(batches(dist.get_rank())[0])
        values = [wrapped.model[number].weight.detach().clone() for number in (0, 2)]
        before = wrapped.flat.master.detach().clone()
        keeps = reference.prune(values, 0.5)
        prune.global_unstructured(prune.select(wrapped.model), prune.L1Unstructured, amount=0.5)
        wrong = []
        for number, keep in zip((0, 2), keeps, strict=True):
            # Whole on every rank: the layout gathers again.
            if not torch.equal(wrapped.model[number].weight == 0, ~keep):
                wrong.append(f"{number}: other elements than the reference's are zero")
        after = wrapped.flat.master.detach()
        if not torch.equal(after[after != 0], before[after != 0]):
            wrong.append("a master of a kept element has changed")
        return wrong
    finally:
        layouts.unregister(wrapped.finder)


def test_masters_keep_their_precision():
    assert_nothing_wrong(run_ranks(low_precision, 3, "flat"))


def criteria_of(kind: str) -> list[str]:
    wrapped, dense, wrong = Wrapped(kind), net(), []
    try:
        targets = prune.select(wrapped.model)
        mine, whole = batches(dist.get_rank())[0], batches()[0]
        if kind == "flat":
            fisher, plain = (
                Fisher(prune.select(m), unit="rank_batch") for m in (wrapped.model, dense)
            )
            for criterion, model in ((fisher, wrapped.model), (plain, dense)):
                with criterion.calibrating(), criterion.batch():
                    model(mine).square().mean().backward()
            found, expected = fisher.scores(), plain.scores()
        else:
            with pytest.raises(NotImplementedError, match="single ranks"):
                fisher = Fisher(targets, unit="rank_batch")
                with fisher.calibrating(), fisher.batch():
                    pass
            snip, plain = SNIP(targets), SNIP(prune.select(dense))
            wrapped.model(mine).square().mean().backward()
            dense(whole).square().mean().backward()
            snip.update(), plain.update()
            found, expected = snip.scores(), plain.scores()
        for number, one, other in zip((0, 2), found.values(), expected.values(), strict=True):
            if not torch.allclose(one, wrapped.mine(number, other), rtol=1e-5, atol=1e-9):
                wrong.append(f"{number}: {one} {other}")
        return wrong
    finally:
        layouts.unregister(wrapped.finder)


@pytest.mark.parametrize("kind", ["flat", "ragged"])
def test_criteria_of_a_registered_layout(kind):
    assert_nothing_wrong(run_ranks(criteria_of, 3, kind))


def test_a_finder_has_to_be_callable():
    with pytest.raises(TypeError, match="finder is a int"):
        layouts.register(3)


# Those of torchtitan.


class Layer(nn.Module):
    """Experts [4, 6, 5] and a matrix [7, 3]; the loss draws the weights to targets."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.experts = nn.Parameter(torch.randn(4, 6, 5, generator=generator))
        self.dense = nn.Parameter(torch.randn(7, 3, generator=generator))

    def forward(self, targets: list[Tensor]) -> Tensor:
        held = [w.to_local() if hasattr(w, "to_local") else w for w in (self.experts, self.dense)]
        return sum((w - t).square().sum() for w, t in zip(held, targets, strict=True))


def sharded_layer(model: Layer, layout: str) -> DeviceMesh:
    """Shard a layer over 4 ranks, in place; returns the mesh of the ranks that divide experts."""
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    names = ("dp_replicate", "efsdp", "ep")
    sizes = (2, 1, 2) if layout == "replicas" else (1, 2, 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    experts = distribute_tensor(model.experts.detach(), mesh["ep"], [Shard(0)])
    model.experts = nn.Parameter(experts)
    if layout == "replicas":
        fully_shard(model, mesh=mesh["dp_replicate", "efsdp"])
        return mesh["ep"]
    on_efsdp = _fsdp_common.FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0)
    dim = 1 if layout == "dimension 1" else 0

    def place(parameter: nn.Parameter) -> Any:
        if parameter is not model.experts:
            return None
        return _fsdp_common.ShardPlacementResult(placement=Shard(dim), mesh_info=on_efsdp)

    fully_shard(model, mesh=world, shard_placement_fn=place)
    return mesh["ep"]


def beside_one_process(
    wrap: Callable[[nn.Module], Any],
    model: nn.Module,
    dense: nn.Module,
    paths: list[tuple[str, str]],
    loss_of: Callable[[nn.Module, int, bool], Tensor],
) -> list[str]:
    """wrong_steps of a model that torch's optimizer steps.

    Args:
        wrap: shards a model like ``dense`` in place, here one of the indices of its elements.
        loss_of: of a model at a step, whole or of this rank.
    """
    numbered = copy.deepcopy(dense)
    for parameter in numbered.parameters():
        parameter.data = torch.arange(parameter.numel()).view(parameter.shape).float()
    wrap(numbered)
    of_numbered, places, of_dense = (
        [(each.get_submodule(path), name) for path, name in paths]
        for each in (numbered, model, dense)
    )
    indices = [local(module._parameters[name]).long() for module, name in of_numbered]
    optimizers = [torch.optim.SGD(m.parameters(), LEARNING_RATE) for m in (model, dense)]

    def step(which: int, number: int) -> None:
        loss_of((model, dense)[which], number, bool(which)).backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    return wrong_steps(
        places, of_dense,
        lambda i, tensor: tensor.reshape(-1)[indices[i]],
        lambda i: local(places[i][0]._parameters[places[i][1]]),
        lambda number: step(0, number), lambda number: step(1, number),
    )  # fmt: skip


def differences(layout: str) -> list[str]:
    model = Layer()
    ep = sharded_layer(model, layout)
    whole = [parameter.detach() for parameter in Layer(1).parameters()]
    mine = [whole[0].chunk(2)[ep.get_local_rank()], whole[1]]

    def loss_of(each: Layer, step: int, is_whole: bool) -> Tensor:
        return each(whole if is_whole else mine)

    paths = [("", "experts"), ("", "dense")]
    return beside_one_process(lambda m: sharded_layer(m, layout), model, Layer(), paths, loss_of)


@pytest.mark.parametrize("layout", ["dimension 0", "dimension 1", "replicas"])
def test_ten_steps_of_titans_layouts_equal_one_process(layout):
    if not hasattr(_fsdp_common, "ShardPlacementResult"):
        pytest.skip("in this torch a group of FSDP2 has one mesh")
    assert_nothing_wrong(run_ranks(differences, 4, layout))


def simple_fsdp(model: nn.Module, mesh: DeviceMesh, placements: list[Placement]) -> nn.Module:
    """Parameters as DTensors, gathered by properties of the modules, as SimpleFSDP does."""

    def gathered(parameter: DTensor) -> Tensor:
        whole = parameter.redistribute(placements=[Replicate()] * mesh.ndim)
        return whole.to_local(grad_placements=[Partial()] * mesh.ndim)

    for module in model.modules():
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in names:
            shards = distribute_tensor(module._parameters[name].detach(), mesh, placements)
            module._parameters[name] = nn.Parameter(shards)
        properties = {
            name: property(lambda self, name=name: gathered(self._parameters[name]))
            for name in names
        }
        module.__class__ = type(f"Simple{type(module).__name__}", (type(module),), properties)
    return model


def simple_fsdp_differences(mode: str) -> list[str]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2) if mode == "hybrid" else (size,))
    kinds = {"shard": [Shard(0)], "replicate": [Replicate()], "hybrid": [Replicate(), Shard(0)]}
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    model = simple_fsdp(copy.deepcopy(dense), mesh, kinds[mode])
    batches = torch.randn(NUM_STEPS, size, 2, 5)
    fisher = Fisher(prune.select(model), unit="rank_batch")
    with pytest.raises(NotImplementedError, match="in a property"), fisher.calibrating():
        pass

    def loss_of(each: nn.Module, step: int, is_whole: bool) -> Tensor:
        batch = batches[step]
        return each(batch.flatten(0, 1) if is_whole else batch[dist.get_rank()]).square().sum()

    paths = [("0", "weight"), ("2", "weight")]
    return beside_one_process(
        lambda m: simple_fsdp(m, mesh, kinds[mode]), model, dense, paths, loss_of
    )


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [*(("shard", size) for size in (1, 2, 3, 4)), ("replicate", 2), ("hybrid", 4)],
)
def test_simple_fsdp(mode, world_size):
    assert_nothing_wrong(run_ranks(simple_fsdp_differences, world_size, mode))


# Shards of rows that lie apart: one even cut of equal groups of rows, and FSDP2 over TP.


def holding(parameter):
    module = nn.Module()
    module.weight = nn.Parameter(parameter)
    return module


def index_of(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def a_view():
    """[4, 6, 3], rows of each expert over 2 ranks, seen as [24, 3]."""
    return distribute_tensor(index_of((4, 6, 3)), init_device_mesh("cpu", (2,)), [Shard(1)]).view(
        24, 3
    )


def a_view_on_two_axes():
    mesh = init_device_mesh("cpu", (1, 2))
    return distribute_tensor(index_of((4, 6, 3)), mesh, [Replicate(), Shard(1)]).view(24, 3)


def by_hand(shape, mesh_shape, placements, rows):
    mesh = init_device_mesh("cpu", mesh_shape)
    part = index_of(shape)[rows[torch.distributed.get_rank()]]
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def nothing_to_the_right():
    return by_hand((8, 3), (2,), [_StridedShard(0, split_factor=2)], [[0, 1, 4, 5], [2, 3, 6, 7]])


def gates_and_ups():
    """[experts, gate and up, in], as transformers' packed_colwise cuts fused experts."""
    shape, mesh = (3, 8, 4), init_device_mesh("cpu", (2,))
    first = 2 * torch.distributed.get_rank()
    part = index_of(shape)[:, [first, first + 1, first + 4, first + 5]]
    placements = [_StridedShard(1, split_factor=2)]
    return DTensor.from_local(part.contiguous(), mesh, placements, run_check=False)


def gates_and_ups_in_fsdp2():
    """The same on two ranks of four; FSDP2 shards the experts, unevenly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = 2 * mesh["tp"].get_local_rank()
    part = index_of((3, 8, 4))[:, [first, first + 1, first + 4, first + 5]]
    placements = [_StridedShard(1, split_factor=2)]
    tensor = DTensor.from_local(part.contiguous(), mesh["tp"], placements, run_check=False)
    return fully_shard(holding(tensor), mesh=mesh["dp"])


def even_as_fsdp2_cuts():
    """Placements as FSDP2 makes them, on a DTensor that has not met FSDP2."""
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return by_hand((8, 3), (2, 2), placements, [[0, 1], [4, 5], [2, 3], [6, 7]])


def fsdp2_over_tp(shape, dim_of_tp, dim_of_fsdp2):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = holding(distribute_tensor(index_of(shape), mesh["tp"], [Shard(dim_of_tp)]))
    return fully_shard(module, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(dim_of_fsdp2))


def unevenly():
    """Groups of three rows over two ranks."""
    rows = [[0, 1, 3, 4], [2, 5]]
    return by_hand((6, 3), (2,), [_StridedShard(0, split_factor=2)], rows)


def another_split_factor():
    rows = [[0, 2], [1, 3], [4, 6], [5, 7]]
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    return by_hand((8, 3), (2, 2), placements, [rows[i] for i in (0, 2, 1, 3)])


def uneven_and_not_from_fsdp2():
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    return by_hand((7, 3), (2, 2), placements, [[0, 1], [4, 5], [2, 3], [6]])


def a_view_in_fsdp2():
    """A cut of FSDP2 over one that it did not make, which strides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = distribute_tensor(index_of((4, 6, 3)), mesh["tp"], [Shard(1)])
    return fully_shard(holding(experts.view(24, 3)), mesh=mesh["dp"])


FOLDED = {
    a_view: 2,
    a_view_on_two_axes: 2,
    nothing_to_the_right: 2,
    gates_and_ups: 2,
    gates_and_ups_in_fsdp2: 4,
    even_as_fsdp2_cuts: 4,
    partial(fsdp2_over_tp, (7, 3), 0, 0): 4,
    partial(fsdp2_over_tp, (5, 8), 1, 0): 4,
    partial(fsdp2_over_tp, (6, 8), 0, 1): 4,
}
REFUSED = {unevenly: 2, another_split_factor: 4, uneven_and_not_from_fsdp2: 4, a_view_in_fsdp2: 4}


WAYS = {
    "alone": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "global": lambda m: prune.global_unstructured(
        [(m, "weight")], prune.L1Unstructured, amount=0.5
    ),
    "rows": lambda m: prune.ln_structured(m, "weight", 0.5, n=2, dim=0),
    "a mask": lambda m: prune.custom_from_mask(m, "weight", torch.ones(m.weight.shape)),
}


def not_refused(makers):
    wrong = []
    for make in makers:
        for way, call in WAYS.items():
            made = make()
            module = made if isinstance(made, nn.Module) else holding(made)
            assert "_S" in str(module.weight.placements)  # as torch prints a _StridedShard
            found = outcome(module, partial(call, module))
            text = "weight(.|\n)*rows that lie apart"
            wrong += other_errors([found], "NotImplementedError", text, f"{make.__name__} {way}")
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_rows_that_lie_apart_are_refused(size):
    makers = [make for make, own in REFUSED.items() if own == size]
    assert_nothing_wrong(run_ranks(not_refused, size, makers))


def folded(make):
    """Prune in every way, beside a plain module; verify, and remove."""
    made = make()
    sharded = made if isinstance(made, nn.Module) else holding(made)
    which, shape = local(sharded.weight).long(), sharded.weight.shape
    plain, wrong = holding(index_of(shape)), []
    generator = torch.Generator().manual_seed(0)
    ties = torch.randn(shape, generator=generator).mul(2).round()
    columns = torch.rand([1] * (len(shape) - 1) + [shape[-1]], generator=generator)
    rows = torch.rand([*shape[:-1], 1], generator=generator)
    factors = prune.FactoredScores([[columns], [rows, columns]])
    mask = torch.randint(2, shape, generator=generator)

    def everything(module, scores, **options):
        prune.global_unstructured(
            [(module, "weight")], prune.L1Unstructured, {(module, "weight"): scores}, **options
        )

    def along(module, **options):
        last = {(module, "weight"): len(shape) - 1}
        everything(module, ties, input_dims=last, **options)

    calls = {
        "ties": lambda m: prune.l1_unstructured(m, "weight", 0.2, importance_scores=ties),
        "values": lambda m: prune.l1_unstructured(m, "weight", 0.2),
        "all": lambda m: everything(m, ties, amount=0.2),
        "factors": lambda m: everything(m, factors, amount=0.4),
        "normalised": lambda m: everything(m, factors, amount=0.4, normalize="rms"),
        "rows": lambda m: along(m, amount=0.5, scope="row"),
        "1:2": lambda m: along(m, pattern="1:2") if shape[-1] % 2 == 0 else None,
        "a mask": lambda m: prune.custom_from_mask(m, "weight", mask),
    }
    for dim in range(len(shape)):
        calls[f"dim {dim}"] = lambda m, dim=dim: prune.ln_structured(m, "weight", 1, n=2, dim=dim)
    for name, call in calls.items():
        call(sharded), call(plain)
        if not hasattr(plain, "weight_mask"):
            continue
        keep = plain.weight_mask.flatten()[which.flatten()].view(which.shape) != 0
        if not torch.equal(local(sharded.weight_mask) != 0, keep):
            wrong.append(name)
        reports = [prune.verify(each, raise_errors=False) for each in (sharded, plain)]
        wrong += [f"{name}: {problem}" for problem in reports[0].all_problems]
        if len({report.parameters[0].fingerprint for report in reports}) != 1:
            wrong.append(f"{name}: another fingerprint")
        prune.remove(sharded, "weight"), prune.remove(plain, "weight")
        if bool(local(sharded.weight)[~keep].any()):
            wrong.append(f"{name}: remove left no zeros")
        with torch.no_grad():
            local(sharded.weight).copy_(which), plain.weight.copy_(index_of(shape))
    shard = ShardReader().read(sharded, "weight", "weight")
    layout = WeightLayout("linear" if len(shape) == 2 else "experts", tuple(shape))
    rows, columns = positions_of(shard, layout)
    at = rows.view(-1, 1) + columns
    is_here = (at >= 0) & (at < which.numel())
    elements = index_of(shape).view(at.shape)[is_here]
    if len(elements) != which.numel() or not torch.equal(elements, shard.flat_values[at[is_here]]):
        wrong.append(f"positions of {elements.tolist()}")
    return wrong


@pytest.mark.parametrize("make", FOLDED)
def test_a_part_of_each_group_of_rows(make):
    assert_nothing_wrong(run_ranks(folded, FOLDED[make], make))
