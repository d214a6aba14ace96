"""A mask buffer that was deleted is an error with its name, in forward and in every call."""

import copy

import pytest
import torch

import distprune as prune
from distprune.base.naming import unwrap
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import EVEN_HIDDEN, Net, fill

WRAPPINGS = ["plain-1", "ddp-2", "fsdp2-2", "fsdp2_root-2", "fsdp1-2", "fsdp1_root-2", "tp-2"]


def problems(wrapping: str, how: str) -> list[str]:
    model = wrappings.wrap(fill(Net(EVEN_HIDDEN), "normal", "float32"), wrapping)
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
    layer = unwrap(wrappings.unwrapped(model).l2)
    mask = layer.weight_mask
    if how == "deleted":
        del layer._buffers["weight_mask"]
    else:
        layer.weight_mask = None
    others = [(unwrap(each), "weight") for each in wrappings.unwrapped(model).children()]
    calls = {
        "select": lambda: prune.select(model, everything=True),
        "prune one": lambda: prune.l1_unstructured(layer, "weight", 0.1),
        "prune all": lambda: prune.global_unstructured(others, prune.L1Unstructured, amount=0.1),
        "remove": lambda: prune.remove(layer, "weight"),
        "forward": lambda: model(torch.ones(2, 6)),
    }
    wrong = []
    for what, call in calls.items():
        try:
            call()
            wrong.append(f"{what}: nothing was raised")
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if not text.startswith("RuntimeError") or "Linear.weight is pruned" not in text:
                wrong.append(f"{what}: {text}")
    if wrappings.kind_of(wrapping) == "plain":
        layer.register_buffer("weight_mask", mask)  # the way out
        other = copy.deepcopy(model)
        prune.l1_unstructured(layer, "weight", 0.1)
        wrong += [] if torch.isfinite(other(torch.ones(2, 6))).all() else ["not mended"]
    return wrong


@pytest.mark.parametrize("how", ["deleted", "None"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_deleted_mask(wrapping, how):
    assert_nothing_wrong_on(wrapping, problems, how)
