"""Pruning, or removing, between a forward and its backward, where nothing is gathered again.

The graph keeps the masked weight of the forward, as in torch. Under FSDP this is not supported.
"""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import Net, seeded

OTHERS = ["plain-1", "ddp-2"]


def made(wrapping, **options):
    return wrappings.wrap(seeded(Net(wrappings.runnable_sizes(wrapping))), wrapping, **options)


def layers(model):
    net = wrappings.unwrapped(model)
    return [wrappings.unwrapped(each) for each in (net.l1, net.l2, net.l3)]


def inputs(rows=4):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))


def prune_first(model):
    prune.l1_unstructured(layers(model)[0], "weight", 0.5)


def prune_all(model):
    targets = [(layer, "weight") for layer in layers(model)]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.4)


def remove(model):
    prune.remove(layers(model)[0], "weight")


def nothing(model):
    pass


CHANGES = {
    "a first pruning": (nothing, prune_all),
    "a first pruning of one layer": (nothing, prune_first),
    "a second pruning": (prune_first, prune_all),
    "remove": (prune_all, remove),
}


def penalty(model):
    """The backward of the square needs the parameters."""
    squares = [parameter.square().sum() for parameter in model.parameters()]
    return 1e-3 * sum(each.full_tensor() if isinstance(each, DTensor) else each for each in squares)


def wrong_elsewhere(wrapping, before, change):
    """Gradients of a backward across the change, against those of one process."""
    model = made(wrapping)
    plain = seeded(Net(wrappings.runnable_sizes(wrapping)))
    full = [name for name, _ in plain.named_parameters() if name.endswith("weight")]
    indices = wrappings.local_indices(copy.deepcopy(plain), wrapping)
    for each in (model, plain):
        before(each)
        loss = each(inputs()).square().sum() + penalty(each)
        change(each)
        loss.backward()
    found = []
    for name in full:
        path, _, leaf = name.rpartition(".")
        layer = plain.get_submodule(path)
        whole = getattr(layer, "weight_orig" if hasattr(layer, "weight_orig") else leaf).grad
        held = wrappings.gradient(model, name, indices)
        expected = wrappings.my_part(whole, indices[name])
        if not torch.allclose(held, expected, rtol=1e-5, atol=1e-6 * float(whole.abs().max())):
            found.append(f"{name}: gradients differ by {(held - expected).abs().max():.2g}")
    return found


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrapping", OTHERS)
def test_elsewhere_the_backward_is_that_of_the_forward(wrapping, change):
    assert_nothing_wrong_on(wrapping, wrong_elsewhere, *CHANGES[change])


def changed_by_remove(wrapping):
    """What of a state dict, taken before, has other values after ``remove``."""
    model = made(wrapping)
    prune_all(model)
    state = get_model_state_dict(model)  # sharded, without copies where the wrapper makes none
    held = {
        name: value.local_shards()[0].tensor
        if hasattr(value, "local_shards")
        else wrappings.local(value)
        for name, value in state.items()
    }
    before = {name: value.clone() for name, value in held.items()}
    for layer in layers(model):
        prune.remove(layer, "weight")
    return [name for name in held if not torch.equal(held[name], before[name])]


@pytest.mark.parametrize("wrapping", [*OTHERS, "tp-2", "fsdp2-2", "fsdp1-2"])
def test_a_state_dict_taken_before_remove(wrapping):
    """It keeps its values, as in torch; shards have their zeros already."""
    for changed in run_ranks(changed_by_remove, wrappings.world_size(wrapping), wrapping):
        assert changed == []
