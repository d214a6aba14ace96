"""Wrappers that distprune learns of by a registered layout: simulations of some that need GPUs.

``Flat`` stores and updates parameters as Megatron's distributed optimizer does: every rank has all
of a low-precision buffer, and an fp32 slice of it, cut without regard to parameters, which its
optimizer steps. ``Ragged`` stores runs of unequal lengths, as veScale's RaggedShard does, or as
torchtitan's flex_shard cuts: ``BlockShard`` in whole blocks of rows, ``Owned`` all on one rank. In
torchtitan 0.3.0 both are layouts of a step of its DistMuon, and parameters are stored as DTensors.
"""

import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distprune as prune
from distprune import layouts
from distprune.criteria import SNIP, Fisher
from distprune.testing import run_ranks
from helpers import reference
from helpers.comparisons import assert_nothing_wrong

SIZES = (6, 7, 4)
NAMES = ["0.weight", "2.weight"]
NUM_STEPS = 10
LEARNING_RATE = 0.05


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

    def __init__(self, flat: Flat, number: int) -> None:
        self.flat, self.number, self.parameter = flat, number, flat.parameters[number]

    @property
    def shape(self):
        return self.parameter.shape

    @property
    def owners(self):
        module, _ = self.flat.places[self.number]
        return [(module, n) for n, p in module._parameters.items() if p is self.parameter]

    @property
    def groups(self):
        return [dist.group.WORLD]

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


def unequal(shape: torch.Size, number: int) -> list[int]:
    """Rank r has about r + 1 times as much as rank 0, and the last but one has nothing."""
    size, shares = dist.get_world_size(), list(range(1, dist.get_world_size() + 1))
    if size > 2:
        shares[-2] = 0
    return [shape.numel() * sum(shares[:r]) // sum(shares) for r in range(size + 1)]


def block_shard(shape: torch.Size, number: int) -> list[int]:
    """BlockShard(dim=0, block_size): of blocks of rows, each rank has those of torch.chunk."""
    block = 2 if shape[0] % 2 == 0 else 1
    chunk = -(-(shape[0] // block) // dist.get_world_size()) * block
    return [min(r * chunk, shape[0]) * shape[1] for r in range(dist.get_world_size() + 1)]


def owned(shape: torch.Size, number: int) -> list[int]:
    """Owned: one rank has all of a parameter, another one of the next."""
    owner = number // 2 % dist.get_world_size()
    return [shape.numel() if r > owner else 0 for r in range(dist.get_world_size() + 1)]


CUTS = {"ragged": unequal, "block_shard": block_shard, "owned": owned}


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
    def __init__(self, module: RaggedLinear, name: str) -> None:
        self.module, self.name = module, name
        self.parameter = module._parameters[name]

    @property
    def shape(self):
        return self.module.shape

    @property
    def owners(self):
        return [(self.module, n) for n, p in self.module._parameters.items() if p is not None]

    @property
    def groups(self):
        return [dist.group.WORLD]

    @property
    def runs(self):
        sizes = self.module.sizes
        return [(sum(sizes[:rank]), size) for rank, size in enumerate(sizes)]

    @property
    def values(self):
        return self.parameter.detach()


def find_ragged(module: nn.Module, name: str):
    return RaggedRun(module, name) if isinstance(module, RaggedLinear) else None


class Wrapped:
    """A model in one of the layouts, and how it is stepped."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.finder = net(), find_ragged
        if kind in CUTS:
            for number in (0, 2):
                weight = self.model[number].weight
                self.model[number] = RaggedLinear(weight, CUTS[kind](weight.shape, number))
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
    wrapped, dense, wrong, keeps = Wrapped(kind), net(), [], None
    optimizer = torch.optim.SGD(dense.parameters(), LEARNING_RATE, momentum=0.9)
    weights = [dense[0].weight, dense[2].weight]

    def zero_pruned(tensors):
        for tensor, keep in zip(tensors, keeps or (), strict=bool(keeps)):
            tensor.data.mul_(keep)

    try:
        for step, (mine, whole) in enumerate(zip(batches(dist.get_rank()), batches(), strict=True)):
            if step in (2, 6):
                keeps = reference.prune([w.detach() for w in weights], 0.4, keeps)
                zero_pruned(weights)
                prune.global_unstructured(
                    prune.select(wrapped.model), prune.L1Unstructured, amount=0.4
                )
            wrapped.step(mine)
            dense(whole).square().mean().backward()
            if keeps:
                zero_pruned([w.grad for w in weights])
            optimizer.step()
            optimizer.zero_grad()
            zero_pruned(weights)
            for number, weight, keep in zip((0, 2), weights, keeps or (), strict=bool(keeps)):
                found = wrapped.run_of(number).values
                if not torch.equal(wrapped.model[number].weight_mask, wrapped.mine(number, keep)):
                    wrong.append(f"step {step}: mask of {number}")
                expected = wrapped.mine(number, weight)
                if not torch.allclose(found, expected, rtol=0, atol=1e-6):
                    wrong.append(f"step {step}: {number}: {found} {expected}")
                if bool(found[~wrapped.mine(number, keep)].any()):
                    wrong.append(f"step {step}: {number} is not zero where it is pruned")
        prune.verify(wrapped.model)
        state = wrapped.model.state_dict()
        wrapped.model.load_state_dict(state)
        for number in (0, 2):
            prune.remove(wrapped.model[number], "weight")
            if list(wrapped.model[number].state_dict()) != ["weight"]:
                wrong.append(f"{number} is not an ordinary module after remove")
    finally:
        layouts.unregister(wrapped.finder)
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["flat", *CUTS])
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


def freed_models() -> list[str]:
    wrapped = Wrapped("ragged")
    prune.global_unstructured(prune.select(wrapped.model), prune.L1Unstructured, amount=0.5)
    wrapped.step(batches(dist.get_rank())[0])
    module = weakref.ref(wrapped.model[0])
    layouts.unregister(wrapped.finder)
    del wrapped
    gc.collect()
    return [] if module() is None else ["a mask keeps its module alive"]


def test_masks_do_not_keep_models_alive():
    assert_nothing_wrong(run_ranks(freed_models, 2))
