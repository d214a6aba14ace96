"""Pruning from a hook of a module: refused where FSDP has gathered the weights."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distprune as prune
from distprune.base.naming import unwrap
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import Net, fill
from helpers.sampling import every

SHARDED = ["fsdp2-2", "fsdp2_root-2", "fsdp1-2", "fsdp1_flat-2", "hsdp-2x2", "tp-2"]
HOOKS = ["forward pre-hook", "forward hook", "backward hook", "gradient hook"]
CALLS = ["global", "single", "remove"]


def call(what: str, model: nn.Module) -> None:
    inner = wrappings.unwrapped(model)
    match what:
        case "global":
            prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
        case "single":
            prune.l1_unstructured(unwrap(inner.l1), "weight", 0.5)
        case "remove":
            prune.remove(unwrap(inner.l2), "weight")


def in_hook(where: str, layer: nn.Module, action) -> None:
    match where:
        case "forward pre-hook":
            layer.register_forward_pre_hook(lambda *_: action())
        case "forward hook":
            layer.register_forward_hook(lambda *_: action())
        case "backward hook":
            layer.register_full_backward_hook(lambda *_: action())
        case "gradient hook":
            layer.register_forward_hook(
                lambda module, inputs, out: out.register_hook(lambda g: action()) and None
            )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def refused(wrapping: str, where: str, what: str) -> list[str]:
    model = fill(Net(), "normal", "float32")
    model = wrappings.wrap(model, wrapping)
    inner = wrappings.unwrapped(model)
    if what == "remove":
        prune.l1_unstructured(unwrap(inner.l2), "weight", 0.3)
    caught, is_first = [], [True]

    def action() -> None:
        if not is_first:
            return
        is_first.pop()
        before = sorted(k for k in vars(unwrap(inner.l2)))
        try:
            call(what, model)
            caught.append("nothing was raised")
        except RuntimeError as error:
            if not re.search(r"(weight|Linear)(.|\n)*is running(.|\n)*optimizer\.step", str(error)):
                caught.append(str(error))
        if sorted(k for k in vars(unwrap(inner.l2))) != before:
            caught.append("the module has changed")

    in_hook(where, unwrap(inner.l2), action)
    x, y = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.mse_loss(model(x), y).backward()
    if is_first:
        caught.append("the hook did not run")
    # Between two steps it works, and the model trains on.
    call(what, model)
    F.mse_loss(model(x), y).backward()
    return caught


def refused_in_all_hooks(wrapping: str) -> list[str]:
    turn = SHARDED.index(wrapping)
    return [
        f"{what} in a {where}: {text}"
        for number, where in enumerate(HOOKS)
        for what in every(2, CALLS, turn + number)
        for text in refused(wrapping, where, what)
    ]


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", SHARDED)
def test_refused_on_shards(wrapping):
    assert_nothing_wrong_on(wrapping, refused_in_all_hooks)


def between_steps(wrapping: str) -> list[str]:
    """In a hook of the optimizer, and after a forward that raised."""
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: call("single", model))
    x, y = batch()
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    wrong = [] if prune.is_pruned(model) else ["not pruned"]
    if wrapping == "fsdp2-2":
        with pytest.raises(RuntimeError):
            model(torch.ones(4, 7))
        call("global", model)
    return wrong


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "fsdp1-2"])
def test_between_two_steps(wrapping):
    assert_nothing_wrong_on(wrapping, between_steps)
