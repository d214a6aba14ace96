"""RigL and SET on shards end with the masks of one process: training in integers is exact."""

import copy

import pytest
import torch
from torch import Tensor, nn

import distprune as prune
from distprune import dynamic
from distprune.testing import run_ranks
from helpers import criteria_runs as runs
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.sampling import THOROUGH, every

WEIGHTS = runs.WEIGHTS
BATCHES = 7


class Signs(torch.optim.Optimizer):
    """Steps of -1, 0 and 1 along the sign of a momentum: integers stay small integers."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.add_(p.grad.sign())
                    p.sub_(momentum.sign())


class OneProcess:
    """RigL as its authors describe it, of whole tensors, by the oracle."""

    def __init__(self, dense: nn.Module, masks: dict[str, Tensor]):
        self.dense, self.masks = dense, masks
        self.weights = {name: p.detach().clone() for name, p in dense.named_parameters()}
        self.momenta = {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def gradients(self, batch) -> dict[str, Tensor]:
        for name, p in self.dense.named_parameters():
            p.data.copy_(self.weights[name] * self.masks.get(name, 1))
        parameters = dict(self.dense.named_parameters())
        found = torch.autograd.grad(runs.loss(self.dense, *batch), list(parameters.values()))
        return dict(zip(parameters, found, strict=True))

    def step(self, batch) -> None:
        for name, gradient in self.gradients(batch).items():
            self.momenta[name] += (gradient * self.masks.get(name, 1)).sign()
            self.weights[name] -= self.momenta[name].sign()

    def update(self, batch, fraction: float) -> None:
        gradients = self.gradients(batch)
        for name, mask in self.masks.items():
            num_dropped = round(fraction * int(mask.sum()))
            (kept,) = reference.prune([self.weights[name]], num_dropped, [mask])
            free = ~kept
            (left,) = reference.prune([gradients[name]], int(free.sum()) - num_dropped, [free])
            new = kept | left
            self.weights[name][new & ~mask] = 0
            self.momenta[name][new ^ mask] = 0
            self.masks[name] = new


class Sharded:
    """The same by the library, on a wrapping."""

    def __init__(self, wrapping: str):
        self.dense = runs.integer_net(wrapping).double()
        self.indices = wrappings.local_indices(self.dense, wrapping)
        generator = torch.Generator().manual_seed(3)
        self.masks = {
            name: torch.rand(self.dense.get_parameter(name).shape, generator=generator) < 0.4
            for name in WEIGHTS
        }
        self.wrapping = wrapping
        self.model = wrappings.wrap(copy.deepcopy(self.dense), wrapping)
        self.optimizer = Signs(self.model.parameters())
        self.pairs = runs.named_targets(self.model, WEIGHTS)
        prune.set_masks(self.pairs, list(self.masks.values()))
        batches = runs.batches(self.dense, BATCHES)
        self.batches = [tuple(t.double() for t in batch) for batch in batches]

    def backward(self, number: int) -> None:
        batch = self.batches[number % BATCHES]
        runs.backward(self.model, batch, *wrappings.data_rank(self.wrapping))


def differences(wrapping: str, num_steps: int, interval: int) -> list[str]:
    sharded = Sharded(wrapping)
    single = OneProcess(sharded.dense, dict(sharded.masks))
    wrong, num_grown = [], 0
    for step in range(num_steps):
        batch = sharded.batches[step % BATCHES]
        if step % interval:
            sharded.backward(step)
            sharded.optimizer.step()
            single.step(batch)
        else:
            with prune.dense_gradients(sharded.model):
                sharded.backward(step)
                fraction = dynamic.cosine_fraction(step, num_steps, first=0.5)
                report = dynamic.rigl_step(sharded.pairs, fraction, optimizer=sharded.optimizer)
            num_grown += report.num_grown
            single.update(batch, fraction)
            wrong += wrong_masks(sharded.model, single.masks, sharded.indices, f"step {step}")
        sharded.optimizer.zero_grad()
        if wrong:
            return wrong
    for name, whole in single.weights.items():
        mask = single.masks.get(name, torch.ones_like(whole))
        keep = wrappings.my_part(mask, sharded.indices[name])
        held = wrappings.shard(sharded.model, name, sharded.indices).view(keep.shape) * keep
        part = wrappings.my_part(whole, sharded.indices[name]) * keep
        if not torch.equal(held.view(part.shape), part):
            wrong.append(f"{name}: {held} is not {part}")
    if not prune.verify(sharded.model).ok or num_grown < max(1, num_steps // 10):
        wrong.append(f"{num_grown} elements have grown")
    return wrong


def test_rigl_over_many_steps():
    assert_nothing_wrong_on("fsdp2-2", differences, 200 if THOROUGH else 24, 4)


@pytest.mark.parametrize(
    "wrapping",
    ["plain-1", "ddp-2", "fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2", "hsdp-2x2", "tp-2",
     "fsdp2_tp-2x2"],
)  # fmt: skip
def test_rigl_on_any_wrapping(wrapping):
    assert_nothing_wrong_on(wrapping, differences, 24 if THOROUGH else 8, 3)


def masks_of_set(wrapping: str) -> list[Tensor]:
    sharded = Sharded(wrapping)
    torch.manual_seed(11)
    for step in range(12):
        sharded.backward(step)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        if step % 3 == 0:
            report = dynamic.set_step(sharded.pairs, 0.3, optimizer=sharded.optimizer)
            assert report.num_grown == report.num_pruned_now > 0
    held = prune.get_masks(sharded.pairs)
    return [(wrappings.local(mask), sharded.indices[name])
            for mask, name in zip(held, WEIGHTS, strict=True)]  # fmt: skip


@pytest.mark.parametrize("wrapping", every(2, ["ddp-2", "fsdp2-2", "fsdp1-2", "fsdp2-3"]))
def test_set_on_shards_equals_one_process(wrapping):
    whole = [mask for mask, _ in masks_of_set("plain-1")]
    for of_rank in run_ranks(masks_of_set, wrappings.world_size(wrapping), wrapping):
        for (held, indices), mask in zip(of_rank, whole, strict=True):
            assert torch.equal(held, wrappings.my_part(mask, indices))


def refused() -> list[str]:
    sharded = Sharded("fsdp2-2")
    texts, before = [], prune.get_masks(sharded.pairs)
    attempts = [
        lambda: dynamic.rigl_step(sharded.pairs, 0.3),  # gradients are masked
        lambda: dynamic.set_step(sharded.pairs, 1.5),
    ]

    def without_backward():
        with prune.dense_gradients(sharded.model):
            dynamic.rigl_step(sharded.pairs, 0.3)

    for attempt in (*attempts, without_backward):
        try:
            attempt()
            texts.append("nothing was raised")
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    for mask, other in zip(before, prune.get_masks(sharded.pairs), strict=True):
        assert torch.equal(mask.to_local(), other.to_local())
    return texts


def test_refused():
    for texts in run_ranks(refused, 2):
        assert "l1.weight: the gradients of its pruned elements are masked" in texts[0]
        assert "fraction=1.5" in texts[1] and "l1.weight has no gradient" in texts[2]
