"""FSDP2 with an all-gather in flight: pruning and removing wait for it, and throw it away.

A forward that ends early, or raises, after a prefetch was issued leaves a gather behind that
nobody waits for; so does ``unshard(async_op=True)``. Such a group calls itself sharded.
"""

import pytest
import torch

import distprune as prune
from distprune.testing import run_ranks
from distprune.wrappers.fsdp2 import managed_parameters
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.models import Net, seeded


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
