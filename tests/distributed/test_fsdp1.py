"""What only FSDP1 has: strategies, flat parameters, mixed precision, summon_full_params.

Masks are compared exactly. Floats to 1e-5: the ranks sum gradients in another order.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

import distprune as prune
import reference
import wraps
from checks import assert_nothing_wrong, wrong_masks
from distprune.testing import run_ranks
from models import Net, fill, target

NAMES = ["l1.weight", "l2.weight", "l3.weight"]
OPTIONS = {
    "default": {},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "bf16": {
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "prefetching": {"limit_all_gathers": False, "forward_prefetch": True},
}


class Pair:
    """A model under FSDP1 and a plain one that torch prunes."""

    def __init__(self, wrapping: str, options: str = "default", net: nn.Module | None = None):
        net = net or Net()
        self.dense = fill(copy.deepcopy(net), "normal", "float32")
        self.indices = wraps.local_indices(self.dense, wrapping, **OPTIONS[options])
        model = fill(copy.deepcopy(net), "normal", "float32")
        self.model = wraps.wrap(model, wrapping, **OPTIONS[options])
        self.keeps: dict[str, torch.Tensor] = {}
        self.wrong: list[str] = []

    def targets(self, model: nn.Module) -> list:
        return [target(wraps.unwrapped(model), name) for name in NAMES]

    def prune(self, amount: float) -> None:
        name = "weight_orig" if self.keeps else "weight"
        scores = [getattr(module, name).detach().clone() for module, _ in self.targets(self.dense)]
        keeps = reference.prune(scores, amount, list(self.keeps.values()) or None)
        for (module, _), keep in zip(self.targets(self.dense), keeps, strict=True):
            torch_prune.custom_from_mask(module, "weight", keep)
        prune.global_unstructured(self.targets(self.model), prune.L1Unstructured, amount=amount)
        self.keeps = dict(zip(NAMES, keeps, strict=True))

    def remove(self) -> None:
        for model, library in [(self.dense, torch_prune), (self.model, prune)]:
            for module, name in self.targets(model):
                library.remove(module, name)
        self.keeps = {}

    def compare(self, when: str) -> None:
        self.wrong += wrong_masks(self.model, self.keeps, self.indices, when)
        for name in self.indices:
            actual = self.dense.get_parameter(name + "_orig" if name in self.keeps else name)
            held = wraps.shard(self.model, name, self.indices)
            self.close(held, wraps.my_part(actual.detach(), self.indices[name]), f"{when}: {name}")

    def close(self, actual: torch.Tensor, expected: torch.Tensor, when: str) -> None:
        if not torch.allclose(actual, expected, rtol=1e-5, atol=1e-5):
            self.wrong.append(f"{when}: off by {(actual - expected).abs().max():.3g}")


def training(wrapping: str, options: str, optimizer: str, optimizer_first: bool) -> list[str]:
    """Prune, evaluate, prune again and remove while training; whole batches on every rank."""
    pair = Pair(wrapping, options)
    kind, arguments = {
        "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    }[optimizer]
    optimizers = []
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        x, y = (torch.randn(6, size, generator=generator) for size in (6, 3))
        if step in (1, 4):
            pair.prune(0.4)
            with torch.no_grad() if step == 1 else torch.inference_mode():
                pair.close(pair.model(x), pair.dense(x), f"step {step}: evaluated")
        if step == 7:
            with torch.no_grad():
                pair.model(x)  # the root keeps a gathered copy of what it was
            pair.remove()
        if not optimizers and (optimizer_first or step == 2):
            optimizers = [kind(m.parameters(), **arguments) for m in (pair.model, pair.dense)]
        for model in (pair.model, pair.dense):
            model.zero_grad()
            for rows, (xs, ys) in enumerate(zip(x.split(3), y.split(3), strict=True)):
                accumulate = model is pair.model and rows == 0 and step % 2
                with model.no_sync() if accumulate else nullcontext():
                    F.mse_loss(model(xs), ys).backward()
        norm = pair.model.clip_grad_norm_(0.5)
        pair.close(norm, nn.utils.clip_grad_norm_(pair.dense.parameters(), 0.5), f"{step}: norm")
        for each in optimizers:
            each.step()
        pair.compare(f"step {step}")
    return pair.wrong


CASES = [
    ("fsdp1-2", "default", "adamw", True),
    ("fsdp1-3", "SHARD_GRAD_OP", "sgd", False),
    ("fsdp1_root-2", "SHARD_GRAD_OP", "adamw", True),
    ("fsdp1_root-3", "default", "sgd", True),
    ("fsdp1_flat-2", "default", "sgd", False),
    ("fsdp1_flat-4", "SHARD_GRAD_OP", "adamw", True),
    ("fsdp1_hybrid-2x2", "default", "adamw", True),
    ("fsdp1-4", "prefetching", "adamw", False),
]


@pytest.mark.parametrize(("wrapping", "options", "optimizer", "first"), CASES)
def test_training_equals_one_process(wrapping, options, optimizer, first):
    size = wraps.world_size(wrapping)
    assert_nothing_wrong(run_ranks(training, size, wrapping, options, optimizer, first))


def gradients_of_pruned_elements(wrapping: str) -> list[str]:
    """Masked before the optimizer, or a norm, sees them."""
    pair = Pair(wrapping)
    pair.prune(0.5)
    pair.model(torch.ones(2, 6)).sum().backward()
    wrong = []
    for module, _ in pair.targets(pair.model):
        gradient, mask = module.weight_orig.grad, module.weight_mask
        if mask.numel() and (gradient[~mask] != 0).any():
            wrong.append("a pruned element has a gradient")
    return wrong


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1_root-3"])
def test_pruned_elements_have_no_gradient(wrapping):
    assert_nothing_wrong(
        run_ranks(gradients_of_pruned_elements, wraps.world_size(wrapping), wrapping)
    )


def mixed_precision(wrapping: str) -> list[str]:
    """Outputs and gradients in bf16 are bit-equal to those of one process in bf16."""
    pair = Pair(wrapping, "bf16")
    pair.prune(0.5)
    pair.compare("bf16")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    out = pair.model(x)
    for module, _ in pair.targets(pair.dense):
        torch_prune.remove(module, "weight")
    half = copy.deepcopy(pair.dense).bfloat16()
    expected = half(x.bfloat16())
    if not torch.equal(out.bfloat16(), expected):
        pair.wrong.append(f"outputs {out} != {expected}")
    out.square().sum().backward()
    expected.square().sum().backward()
    if wrapping != "fsdp1_flat-2":
        for (module, _), name in zip(pair.targets(pair.model), NAMES, strict=True):
            index = pair.indices[name]
            gradient = wraps.my_part(half.get_parameter(name).grad.float(), index)
            gradient = gradient * wraps.my_part(pair.keeps[name], index)
            if index.numel() and not torch.equal(module.weight_orig.grad, gradient):
                pair.wrong.append(f"{name}: gradient")
    return pair.wrong


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1_root-2", "fsdp1_flat-2"])
def test_bf16_mixed_precision_is_bit_equal(wrapping):
    assert_nothing_wrong(run_ranks(mixed_precision, wraps.world_size(wrapping), wrapping))


class TiedNet(Net):
    """l2 and l4 share their weight; l1 lies in memory by columns."""

    def __init__(self):
        super().__init__((6, 6, 6, 3))
        self.l4 = nn.Linear(6, 6)
        self.l4.weight = self.l2.weight
        self.l1.weight = nn.Parameter(torch.empty(6, 6).t())

    def forward(self, x):
        return super().forward(torch.tanh(self.l4(x)))


def tied_and_by_columns(use_orig_params: bool) -> list[str]:
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    dense, net = (fill(TiedNet(), "few", "float32") for _ in range(2))
    model = FSDP(net, **options)
    selected = prune.select(model)
    names = [pair.fqn for pair in selected]
    wrong = [] if names == NAMES else [f"selected {names}"]
    keeps = reference.prune([dense.get_parameter(name) for name in NAMES], 0.5)
    report = prune.global_unstructured(selected, prune.L1Unstructured, amount=0.5)
    if report.num_elements != 90:
        wrong.append(f"{report.num_elements} elements")
    for name, keep in zip(NAMES, keeps, strict=True):
        torch_prune.custom_from_mask(*target(dense, name), keep)
    torch_prune.custom_from_mask(dense.l4, "weight", keeps[1])
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for when in ("pruned", "stepped"):
        out, expected = model(x), dense(x)
        if not torch.allclose(out, expected, atol=1e-6):
            wrong.append(f"{when}: outputs are off by {(out - expected).abs().max()}")
        out.sum().backward()
        expected.sum().backward()
        for parameters in (model.parameters(), [p for n, p in dense.named_parameters()]):
            torch.optim.SGD(parameters, lr=0.1).step()
    for key, value in model.state_dict().items():
        if not torch.allclose(value.float(), dense.state_dict()[key].float(), atol=1e-6):
            wrong.append(f"state dict: {key}")
    for module, name in selected:
        prune.remove(module, name)
    if prune.is_pruned(model) or sorted(model.state_dict()) != sorted(TiedNet().state_dict()):
        wrong.append("not an ordinary model again")
    return wrong


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_tied_and_transposed_parameters_of_one_flat_parameter(use_orig_params):
    assert_nothing_wrong(run_ranks(tied_and_by_columns, 2, use_orig_params))


def summoned(wrapping: str) -> list[str]:
    """Inside summon_full_params the stored weights are whole and raw."""
    pair = Pair(wrapping)
    pair.prune(0.5)
    x = torch.ones(2, 6)
    with torch.no_grad():
        pair.model(x)  # the root keeps a masked copy
    layer = pair.model.module.l1.module
    with FSDP.summon_full_params(pair.model, writeback=True):
        pair.close(layer.weight_orig, pair.dense.l1.weight_orig, "summoned")
        try:
            pair.wrong.append(f"weight is there without its mask: {layer.weight}")
        except RuntimeError as error:
            if "summon_full_params" not in str(error):
                pair.wrong.append(str(error))
        layer.weight_orig.data.mul_(2)
    with torch.no_grad():
        pair.dense.l1.weight_orig.mul_(2)
    pair.compare("written back")
    pair.close(pair.model(x), pair.dense(x), "after")
    return pair.wrong


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1_flat-2"])
def test_summon_full_params_shows_the_stored_weights(wrapping):
    assert_nothing_wrong(run_ranks(summoned, wraps.world_size(wrapping), wrapping))
