"""A pruned model trains as one process with torch.nn.utils.prune and the same masks does.

Masks are compared exactly. Floats to 1e-5: the ranks sum gradients in another order.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import distprune as prune
import reference
import wraps
from checks import assert_nothing_wrong, wrong_masks
from distprune.testing import run_ranks
from models import Net, fill, target

WRAPPINGS = [
    *["plain-1", "ddp-2", "ddp-3", "fsdp2-1", "fsdp2-2", "fsdp2-3", "fsdp2-4"],
    *["fsdp2_root-2", "fsdp2_root-4", "fsdp2_dim1-2", "fsdp2_dim1-3", "hsdp-2x2", "hsdp-1x3"],
    *["tp-2", "tp-4", "fsdp2_tp-2x2"],
]
WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": False}),
}
NUM_STEPS = 5
PLANS = {  # amounts by the step before which they are pruned, and what else happens
    "optimizer made after": {"amounts": {0: 0.5}, "optimizer_last": True},
    "pruned twice": {"amounts": {1: 0.4, 3: 0.5}},  # here and below: optimizer made before
    "removed and pruned again": {"amounts": {1: 0.5, 4: 0.6}, "remove_at": 3},
    "evaluated first": {"amounts": {0: 0.3, 2: 0.5}, "evaluate": True, "remove_at": 4},
    "pruned in inference mode": {"amounts": {1: 0.4, 3: 0.5}, "inference": True},
}


class Pair:
    """The sharded model and its reference: a dense copy pruned by torch itself."""

    def __init__(self, wrapping: str, **fsdp_options):
        sizes = wraps.runnable_sizes(wrapping)
        self.dense = fill(Net(sizes), "normal", "float32")
        self.indices = wraps.local_indices(self.dense, wrapping)
        self.model = wraps.wrap(fill(Net(sizes), "normal", "float32"), wrapping, **fsdp_options)
        self.live = wraps.kind_of(wrapping).startswith(("fsdp2", "hsdp"))
        self.part, self.num_parts = wraps.data_rank(wrapping)
        self.keeps: dict[str, Tensor] = {}
        self.wrong: list[str] = []

    def targets(self, model: nn.Module) -> list:
        return [target(wraps.unwrapped(model), name) for name in WEIGHTS]

    def prune(self, amount: float, inference: bool = False) -> None:
        name = "weight_orig" if self.keeps else "weight"
        scores = [getattr(module, name).detach().clone() for module, _ in self.targets(self.dense)]
        keeps = reference.prune(scores, amount, list(self.keeps.values()) or None)
        for (module, _), keep in zip(self.targets(self.dense), keeps, strict=True):
            torch_prune.custom_from_mask(module, "weight", keep)
        targets = self.targets(self.model)
        with torch.inference_mode(inference):
            prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
        self.keeps = dict(zip(WEIGHTS, keeps, strict=True))

    def remove(self) -> None:
        for model, library in [(self.dense, torch_prune), (self.model, prune)]:
            for module, name in self.targets(model):
                library.remove(module, name)
        self.keeps = {}

    def parameters(self) -> list[tuple[str, Tensor, Tensor, Tensor]]:
        """(name, sharded, dense, indices of the shard) of each parameter."""
        rows = []
        for name, indices in self.indices.items():
            actual = name + "_orig" if name in self.keeps else name
            sharded = wraps.unwrapped(self.model).get_parameter(actual)
            rows.append((name, sharded, self.dense.get_parameter(actual), indices))
        return rows

    def my_rows(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.num_parts)[self.part]

    def compare_outputs(self, x: Tensor, when: str) -> None:
        with torch.no_grad():
            self.close(self.model(self.my_rows(x)), self.my_rows(self.dense(x)), f"{when}: outputs")

    def compare_gradients(self, when: str) -> None:
        for name, sharded, dense, indices in self.parameters():
            gradient = sharded.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.redistribute(placements=sharded.placements)
            gradient = wraps.local(gradient)
            self.close(gradient, wraps.my_part(dense.grad, indices), f"{when}: gradient of {name}")
            if name in self.keeps and gradient[~wraps.my_part(self.keeps[name], indices)].any():
                self.wrong.append(f"{when}: pruned elements of {name} have a gradient")

    def compare_values(self, when: str) -> None:
        self.wrong += wrong_masks(self.model, self.keeps, self.indices, when)
        for name, sharded, dense, indices in self.parameters():
            held = wraps.local(sharded)
            self.close(held, wraps.my_part(dense.detach(), indices), f"{when}: {name}")
            if name in self.keeps and self.live:
                effective = wraps.local(target(self.model, name)[0].weight)
                if not torch.equal(effective, held * wraps.my_part(self.keeps[name], indices)):
                    self.wrong.append(f"{when}: {name} is not orig * mask as they are now")

    def close(self, actual: Tensor, expected: Tensor, when: str) -> None:
        if actual.shape != expected.shape:
            self.wrong.append(f"{when}: shape {list(actual.shape)}, not {list(expected.shape)}")
        elif not torch.allclose(actual, expected, rtol=1e-5, atol=1e-5):
            self.wrong.append(f"{when}: off by {(actual - expected).abs().max():.3g}")


def differences(wrapping: str, optimizer: str, plan: dict, **fsdp_options) -> list[str]:
    pair = Pair(wrapping, **fsdp_options)
    kind, options = OPTIMIZERS[optimizer]
    sizes = pair.dense.l1.in_features, pair.dense.l3.out_features
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(NUM_STEPS, 12, sizes[0], generator=generator)
    ys = torch.randn(NUM_STEPS, 12, sizes[1], generator=generator)
    optimizers = []
    for step, (x, y) in enumerate(zip(xs, ys, strict=True)):
        when = f"step {step}"
        if not optimizers and not plan.get("optimizer_last"):
            optimizers = [kind(m.parameters(), **options) for m in (pair.model, pair.dense)]
        if step == plan.get("remove_at"):
            if plan.get("evaluate"):
                pair.compare_outputs(x, f"{when}, evaluated")
            pair.remove()
            pair.compare_values(f"{when}, removed")
        if step in plan["amounts"]:
            if plan.get("evaluate"):
                pair.compare_outputs(x, f"{when}, evaluated")
            pair.prune(plan["amounts"][step], plan.get("inference", False))
            pair.compare_values(f"{when}, pruned")
            if plan.get("evaluate"):
                pair.compare_outputs(x, f"{when}, pruned and evaluated")
        if not optimizers:
            optimizers = [kind(m.parameters(), **options) for m in (pair.model, pair.dense)]

        for each in optimizers:
            each.zero_grad()
        out, out_dense = pair.model(pair.my_rows(x)), pair.dense(x)
        pair.close(out, pair.my_rows(out_dense), f"{when}: outputs")
        loss, loss_dense = F.mse_loss(out, pair.my_rows(y)), F.mse_loss(out_dense, y)
        loss.backward()
        loss_dense.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        pair.close(mean / dist.get_world_size(), loss_dense.detach(), f"{when}: loss")
        pair.compare_gradients(when)
        for each in optimizers:
            each.step()
        pair.compare_values(f"{when}, updated")
    return pair.wrong


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_training_equals_one_process(wrapping, plan):
    """With both optimizers on 1 and 2 ranks; on more ranks, which are dear, they take turns."""
    size, turn = wraps.world_size(wrapping), list(PLANS).index(plan) + WRAPPINGS.index(wrapping)
    for optimizer in OPTIMIZERS if size <= 2 else [list(OPTIMIZERS)[turn % 2]]:
        assert_nothing_wrong(run_ranks(differences, size, wrapping, optimizer, PLANS[plan]))


FSDP_OPTIONS = {
    "kept unsharded": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("options", FSDP_OPTIONS)
@pytest.mark.parametrize("wrapping", ["fsdp2-2", "fsdp2_root-2", "hsdp-2x2", "fsdp2_tp-2x2"])
def test_training_with_options_of_fsdp2(wrapping, options):
    size, plan = wraps.world_size(wrapping), PLANS["evaluated first"]
    per_rank = run_ranks(differences, size, wrapping, "adamw", plan, **FSDP_OPTIONS[options])
    assert_nothing_wrong(per_rank)


def frozen(wrapping: str) -> list[str]:
    """Parameters that need no gradient can be pruned too."""
    pair = Pair(wrapping)
    for parameter in [*pair.model.parameters(), *pair.dense.parameters()]:
        parameter.requires_grad_(False)
    pair.prune(0.5)
    pair.compare_values("frozen")
    pair.compare_outputs(torch.ones(12, pair.dense.l1.in_features), "frozen")
    return pair.wrong


@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-2", "fsdp2_root-3", "tp-2"])
def test_frozen_parameters(wrapping):
    assert_nothing_wrong(run_ranks(frozen, wraps.world_size(wrapping), wrapping))


def accumulated(wrapping: str) -> list[str]:
    """Two backward passes before one comparison; FSDP2 reduces on the second only."""
    pair = Pair(wrapping)
    pair.prune(0.5)
    generator = torch.Generator().manual_seed(1)
    for last in (False, True):
        x = torch.randn(12, 6, generator=generator)
        pair.model.set_requires_gradient_sync(last)
        pair.model(pair.my_rows(x)).square().mean().backward()
        pair.dense(x).square().mean().backward()
    pair.compare_gradients("accumulated")
    norm = nn.utils.clip_grad_norm_(pair.model.parameters(), 0.01)
    expected = nn.utils.clip_grad_norm_(pair.dense.parameters(), 0.01)
    pair.close(norm.full_tensor(), expected, "norm of the gradients")
    pair.compare_gradients("clipped")
    return pair.wrong


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "fsdp2_root-3", "hsdp-2x2"])
def test_gradients_accumulate_and_clip(wrapping):
    assert_nothing_wrong(run_ranks(accumulated, wraps.world_size(wrapping), wrapping))
