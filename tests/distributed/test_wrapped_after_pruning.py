"""A model that was pruned first and wrapped second: without masks_aside it is told.

That it trains with its masks, sharded, is a row of test_operations.py.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.models import Net, fill


def pruned() -> nn.Module:
    """Pruned by one process: its masks are whole."""
    model = fill(Net(), "normal", "float32")
    for layer in model.children():
        prune.custom_from_mask(layer, "weight", layer.weight > 0)
    return model


def told(wrapping: str) -> list[str]:
    """Pruning, verify and remove say what to do; with masks_aside nothing whole is left."""
    model = wrappings.wrap(pruned(), wrapping)
    layer, wrong = unwrap(wrappings.unwrapped(model).l1), []
    calls = {
        "prune": lambda: prune.l1_unstructured(layer, "weight", 0.1),
        "remove": lambda: prune.remove(layer, "weight"),
        "verify": lambda: prune.verify(model),
    }
    for what, call in calls.items():
        try:
            call()
            wrong.append(f"{what}: nothing was raised")
        except (RuntimeError, prune.VerificationError) as error:
            wrong += [f"{what}: {error}"] * ("masks_aside" not in str(error))
    model = pruned()
    with prune.masks_aside(model):
        wrong += ["still pruned inside"] * prune.is_pruned(model)
        model = wrappings.wrap(model, wrapping)
    for module in wrappings.unwrapped(model).modules():
        for name, held in [*module._buffers.items(), *module.__dict__.items()]:
            whole = isinstance(held, torch.Tensor) and not isinstance(held, DTensor)
            if whole and held.numel() >= 50 and name not in ("weight", "_flat_param"):
                wrong.append(f"a whole tensor is left: {name} {tuple(held.shape)}")
    return wrong


def test_what_is_told_of_a_model_that_was_pruned_before_it_was_sharded():
    for wrapping in ("fsdp2-2", "fsdp1-2", "fsdp1_flat-2"):
        assert_nothing_wrong(run_ranks(told, 2, wrapping))
