"""FSDP2 with an all-gather in flight: pruning and removing wait for it, and throw it away.

A forward that ends early, or raises, after a prefetch was issued leaves a gather behind that
nobody waits for; so does ``unshard(async_op=True)``. Such a group calls itself sharded.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distprune as prune
from distprune.base.naming import unwrap
from distprune.testing import run_ranks
from distprune.wrappers.fsdp2 import managed_parameters
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, other_errors, outcome
from helpers.models import Net, seeded
from helpers.sampling import every


class Early(Net):
    """A Net that can end, or raise, before its second layer."""

    how = "not"

    def forward(self, x):
        x = torch.relu(self.l1(x))
        if self.how == "raise":
            raise InterruptedError("in the middle of forward")
        return x if self.how == "return" else self.l3(torch.tanh(self.l2(x)))


def inputs():
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(5))


def has_gather_in_flight(layer):
    record = managed_parameters()[id(layer), "weight"]
    return record.group._all_gather_result is not None


def unshard_early(model):
    model.l2.unshard(async_op=True)


def forward_that_returns(model):
    model.l1.set_modules_to_forward_prefetch([model.l2])
    model.how = "return"
    with torch.no_grad():
        model(inputs())


def forward_that_raises(model):
    model.l1.set_modules_to_forward_prefetch([model.l2])
    model.how = "raise"
    with pytest.raises(InterruptedError):
        model(inputs())


def backward_that_raises(model):
    model.l3.set_modules_to_backward_prefetch([model.l2])

    def stop(grad):
        raise InterruptedError("in the middle of backward")

    hidden = []
    handle = model.l3.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
    output = model(inputs())
    handle.remove()
    hidden.pop().register_hook(stop)
    with pytest.raises(InterruptedError):
        output.sum().backward()


IN_FLIGHT = [unshard_early, forward_that_returns, forward_that_raises, backward_that_raises]


def prune_first(model):
    prune.l1_unstructured(model.l2, "weight", 0.5)


def prune_all(model):
    targets = [(layer, "weight") for layer in (model.l1, model.l2, model.l3)]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)


def remove(model):
    prune.remove(model.l2, "weight")


def nothing(model):
    """What comes before a first pruning."""


CHANGES = {
    "a first pruning": (nothing, prune_first),
    "a second pruning": (prune_first, prune_all),
    "remove": (prune_first, remove),
    "remove of a pruning that was not the first": (prune_all, remove),
}


def wrong(interrupt, before, change):
    model = wrappings.wrap(seeded(Early()), "fsdp2-2")
    plain = seeded(Net())
    before(model)
    before(plain)
    with torch.no_grad():
        model(inputs())  # lazy initialisation, and gathers with the earlier mask
    interrupt(model)
    if not has_gather_in_flight(model.l2):
        return ["no gather was in flight"]
    change(model)
    change(plain)
    found = ["a gather is still in flight"] if has_gather_in_flight(model.l2) else []
    model.how = "not"
    with torch.no_grad():
        output, expected = model(inputs()), plain(inputs())
    if not torch.equal(output, expected):
        found.append(f"the output differs by {(output - expected).abs().max():.2g}")
    return found


def wrong_after_waiting():
    """The handle of an asynchronous unshard may be waited for after the pruning."""
    model, plain = wrappings.wrap(seeded(Net()), "fsdp2-2"), seeded(Net())
    handle = model.l2.unshard(async_op=True)
    prune_first(model)
    prune_first(plain)
    handle.wait()
    with torch.no_grad():
        return [] if torch.equal(model(inputs()), plain(inputs())) else ["another output"]


def wrong_gradients(interrupt):
    """A training step after the interruption, against a model that was not interrupted."""
    models = [wrappings.wrap(seeded(Early()), "fsdp2-2") for _ in range(2)]
    interrupt(models[0])
    for model in models:
        prune_all(model)
        model.how = "not"
        model.zero_grad()
        model(inputs()).square().sum().backward()
    return [
        name
        for (name, p), (_, q) in zip(*(m.named_parameters() for m in models), strict=True)
        if not torch.equal(p.grad.to_local(), q.grad.to_local())
    ]


def all_wrong() -> list[str]:
    found = [
        f"{interrupt.__name__}, {name}: {text}"
        for interrupt in IN_FLIGHT
        for name, (before, change) in CHANGES.items()
        for text in wrong(interrupt, before, change)
    ]
    found += [f"waited for: {text}" for text in wrong_after_waiting()]
    return found + [f"gradient of {name}" for name in wrong_gradients(unshard_early)]


def test_forwards_and_backwards_have_the_new_mask():
    assert_nothing_wrong(run_ranks(all_wrong, 2))


# Pruning from a hook of a module: refused where FSDP has gathered the weights.


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
    model = seeded(Net())
    model = wrappings.wrap(model, wrapping)
    inner = wrappings.unwrapped(model)
    if what == "remove":
        prune.l1_unstructured(unwrap(inner.l2), "weight", 0.3)
    caught, is_first = [], [True]

    def action() -> None:
        if not is_first:
            return
        is_first.pop()
        found = outcome(unwrap(inner.l2), lambda: call(what, model))
        text = r"(weight|Linear)(.|\n)*is running(.|\n)*optimizer\.step"
        caught.extend(other_errors([found], "RuntimeError", text))

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
    model = wrappings.wrap(seeded(Net()), wrapping)
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
