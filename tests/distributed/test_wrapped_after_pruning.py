"""A model that was pruned first and wrapped second trains with its masks, sharded."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, wrong_masks
from helpers.models import EVEN_HIDDEN, Net, fill, target

NAMES = ["l1.weight", "l2.weight", "l3.weight"]
SHARDED = [
    *["fsdp2-2", "fsdp2_root-3", "hsdp-2x2", "fsdp1-2", "fsdp1_root-3", "fsdp1_flat-2"],
    *["fsdp1_hybrid-2x2"],
]


def pruned(amount: float = 0.5, sizes=None) -> tuple[nn.Module, nn.Module, dict]:
    """A model pruned here, one pruned by torch, and the masks."""
    dense, model = (fill(Net(sizes) if sizes else Net(), "normal", "float32") for _ in range(2))
    keeps = reference.prune([dense.get_parameter(name) for name in NAMES], amount)
    for name, keep in zip(NAMES, keeps, strict=True):
        torch_prune.custom_from_mask(*target(dense, name), keep)
    # A list of one rank: the masks are made before anything is distributed.
    for name, keep in zip(NAMES, keeps, strict=True):
        prune.custom_from_mask(*target(model, name), keep)
    return model, dense, dict(zip(NAMES, keeps, strict=True))


def train(model: nn.Module, dense: nn.Module, steps: int, when: str) -> list[str]:
    """AdamW on the same batch everywhere; what differs from the dense model."""
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in (model, dense)
    ]
    generator, wrong = torch.Generator().manual_seed(1), []
    for step in range(steps):
        x, y = (torch.randn(4, size, generator=generator) for size in (6, 3))
        losses = []
        for optimizer, each in zip(optimizers, (model, dense), strict=True):
            optimizer.zero_grad()
            losses.append(F.mse_loss(each(x), y))
            losses[-1].backward()
            optimizer.step()
        if not torch.allclose(losses[0], losses[1], rtol=1e-5):
            wrong.append(f"{when}, step {step}: loss {losses[0]}, not {losses[1]}")
    return wrong


def pruning_hooks(module: nn.Module) -> list:
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, prune.BasePruningMethod)]


def problems(wrapping: str, how: str) -> list[str]:
    model, dense, keeps = pruned()
    if how == "after a forward":
        model(torch.ones(2, 6)).sum().backward()
        model.zero_grad()
    indices = wrappings.local_indices(Net(), wrapping)
    hooks = [pruning_hooks(target(model, name)[0]) for name in NAMES]
    wrong = []
    with prune.masks_aside(model):
        wrong += ["still pruned inside"] * prune.is_pruned(model)
        model = wrappings.wrap(model, wrapping)
    wrong += wrong_masks(model, keeps, indices, how)
    wrong += train(model, dense, 3, how)
    # Nothing whole is left on a rank: neither masks nor products.
    for module in wrappings.unwrapped(model).modules():
        for name, held in [*module._buffers.items(), *module.__dict__.items()]:
            whole = isinstance(held, torch.Tensor) and not isinstance(held, DTensor)
            if whole and held.numel() >= 60 and name not in ("weight", "_flat_param"):
                wrong.append(f"a whole tensor is left: {name} {tuple(held.shape)}")
    layers = [target(wrappings.unwrapped(model), name)[0] for name in NAMES]
    layers = [getattr(layer, "_fsdp_wrapped_module", layer) for layer in layers]
    if [pruning_hooks(layer) for layer in layers] != hooks:
        wrong.append("other hooks")
    for layer in layers:
        prune.remove(layer, "weight")
        left = [name for name in vars(layer) if name.startswith("_distprune")]
        wrong += [f"left after remove: {name}" for name in left]
    return wrong


@pytest.mark.parametrize("how", ["put aside", "after a forward"])
@pytest.mark.parametrize("wrapping", SHARDED)
def test_prune_then_wrap(wrapping, how):
    assert_nothing_wrong_on(wrapping, problems, how)


def without_masks_aside(wrapping: str) -> list[str]:
    """Pruning, verify and remove say what to do."""
    model, _, _ = pruned()
    model = wrappings.wrap(model, wrapping)
    layer = unwrap(target(wrappings.unwrapped(model), NAMES[0])[0])
    calls = {
        "prune": lambda: prune.l1_unstructured(layer, "weight", 0.1),
        "remove": lambda: prune.remove(layer, "weight"),
        "verify": lambda: prune.verify(model),
    }
    wrong = []
    for what, call in calls.items():
        try:
            call()
            wrong.append(f"{what}: nothing was raised")
        except (RuntimeError, prune.VerificationError) as error:
            wrong += [f"{what}: {error}"] * ("masks_aside" not in str(error))
    return wrong


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "fsdp1-2", "fsdp1_flat-2"])
def test_a_model_that_was_pruned_before_it_was_sharded(wrapping):
    assert_nothing_wrong_on(wrapping, without_masks_aside)


def tensor_parallel() -> list[str]:
    model, dense, keeps = pruned(sizes=EVEN_HIDDEN)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    plan = {"l1": ColwiseParallel(), "l2": RowwiseParallel()}
    with prune.masks_aside(model):
        parallelize_module(model, mesh, plan)
    wrong = train(model, dense, 3, "tensor-parallel")
    for name in plan:
        mask = target(model, f"{name}.weight")[0].weight_mask
        if not isinstance(mask, DTensor):
            wrong.append(f"{name}: mask is a {type(mask)}")
        elif not torch.equal(mask.full_tensor().bool(), keeps[f"{name}.weight"]):
            wrong.append(f"{name}: another mask")
    return wrong


def test_tensor_parallelism_after_pruning():
    assert_nothing_wrong(run_ranks(tensor_parallel, 2))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def tied(wrapping: str) -> list[str]:
    model = fill(Tied(), "normal", "float32")
    dense = copy.deepcopy(model)
    own = torch.distributed.new_subgroups(1)[0]
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5, group=own)
    keep = model.a.weight_mask.clone()
    for layer in (dense.a, dense.b):
        torch_prune.custom_from_mask(layer, "weight", keep)
    with prune.masks_aside(model):
        model = wrappings.wrap(model, wrapping)
    x = torch.ones(2, 6)
    wrong = [] if torch.allclose(model(x), dense(x), atol=1e-6) else ["outputs"]
    for module, name in prune.select(model):
        prune.remove(module, name)
    wrong += ["still pruned"] * prune.is_pruned(model)
    return wrong + ([] if torch.allclose(model(x), dense(x), atol=1e-6) else ["after remove"])


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp2_root-2", "fsdp1_root-2"])
def test_tied_parameters(wrapping):
    assert_nothing_wrong(run_ranks(tied, 2, wrapping))


def refused() -> str:
    model = wrappings.wrap(fill(Net(), "normal", "float32"), "fsdp2-2")
    prune.l1_unstructured(model.l1, "weight", 0.5)
    try:
        with prune.masks_aside(model):
            return "nothing"
    except NotImplementedError as error:
        return str(error)


def test_masks_of_a_wrapped_model_stay():
    for text in run_ranks(refused, 2):
        assert re.match("l1.weight is sharded already", text)
