"""Pruning, or removing, between a forward and its backward.

FSDP gathers parameters again for backward, so under it the call is refused while a backward may
still come, and only then: not after it, nor after an evaluation, nor for outputs that are gone.
Elsewhere the graph keeps the masked weight of the forward, as in torch.
"""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, changes, snapshot
from helpers.models import Net, seeded
from helpers.sampling import every

MANAGED = ["fsdp2-2", "fsdp2_root-2", "fsdp2_tp-1x2", "fsdp1-2", "fsdp1_root-2", "fsdp1_flat-2"]
OTHERS = ["plain-1", "ddp-2", "tp-2"]


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


def loss_is_pending(model):
    return model(inputs()).square().sum()


def one_of_two_has_run(model):
    first, second = (model(inputs(rows)).square().sum() for rows in (3, 4))
    first.backward()
    return second


def an_evaluation_has_run_since(model):
    loss = model(inputs()).square().sum()
    with torch.no_grad():
        model(inputs())
    return loss


def the_graph_was_retained(model):
    loss = model(inputs()).square().sum()
    loss.backward(retain_graph=True)
    return loss


PENDING = [loss_is_pending, one_of_two_has_run, an_evaluation_has_run_since, the_graph_was_retained]


def not_refused(wrapping, forward, before, change):
    model = made(wrapping)
    before(model)
    kept = forward(model)
    taken = snapshot(model)
    try:
        change(model)
    except RuntimeError as error:
        found = [] if "whose backward is still to come" in str(error) else [str(error)]
        return found + changes(taken, snapshot(model))
    del kept
    return ["not refused"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrapping", MANAGED)
def test_refused_on_every_rank(wrapping, change):
    assert_nothing_wrong_on(wrapping, not_refused, loss_is_pending, *CHANGES[change])


@pytest.mark.parametrize("forward", PENDING[1:])
@pytest.mark.parametrize("wrapping", ["fsdp2-2", "fsdp2_root-2", "fsdp1-2", "fsdp1_root-2"])
def test_refused_whatever_ran_since(wrapping, forward):
    before, change = CHANGES["a second pruning"]
    assert_nothing_wrong(run_ranks(not_refused, 2, wrapping, forward, before, change))


def wrong_on_one_rank(wrapping):
    """Rank 0 alone keeps what its forward returned."""
    model = made(wrapping)
    loss = loss_is_pending(model)
    rank = torch.distributed.get_rank()
    kept = loss if rank == 0 else None
    del loss
    taken = snapshot(model)
    try:
        prune_all(model)
    except RuntimeError as error:
        found = [] if "still to come" in str(error) else [str(error)]
        return found + (changes(taken, snapshot(model)) if rank == 0 else names_left(model))
    del kept
    return ["not refused"]


def names_left(model):
    return [name for name, _ in model.named_parameters() if name.endswith("_orig")]


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "fsdp1-2"])
def test_a_graph_on_one_rank_stops_all_of_them(wrapping):
    assert_nothing_wrong(run_ranks(wrong_on_one_rank, 2, wrapping))


def wrong_after_refusal(wrapping):
    """The backward is as if nothing had been tried, and afterwards the pruning goes through."""
    tried, other = made(wrapping), made(wrapping)
    losses = []
    for model in (tried, other):
        prune_first(model)
        losses.append(model(inputs()).square().sum())
    try:
        prune_all(tried)
        return ["not refused"]
    except RuntimeError:
        pass
    for model, loss in zip((tried, other), losses, strict=True):
        loss.backward()
        prune_all(model)
    with torch.no_grad():
        outputs = [model(inputs()) for model in (tried, other)]
    found = [] if torch.equal(*outputs) else ["outputs differ"]
    for model in (tried, other):
        for parameter in model.parameters():
            parameter.grad = None
        model(inputs()).square().sum().backward()
    return found + different_gradients(tried, other)


def different_gradients(model, other):
    found = []
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if (p.grad is None) != (q.grad is None):
            found.append(f"{name}: a gradient on one of them")
        elif p.grad is not None and not torch.equal(
            wrappings.local(p.grad), wrappings.local(q.grad)
        ):
            found.append(f"{name}: gradients differ")
    return found


@pytest.mark.parametrize("wrapping", MANAGED)
def test_the_backward_goes_on_after_the_refusal(wrapping):
    assert_nothing_wrong_on(wrapping, wrong_after_refusal)


def after_backward(model):
    loss = model(inputs()).square().sum()
    loss.backward()
    return loss


def after_backward_and_evaluation(model):
    output = model(inputs())
    loss = output.square().sum()
    loss.backward()
    with torch.no_grad():
        model(inputs())
    return loss, output, output.mean()


def after_evaluation(model):
    with torch.no_grad():
        return model(inputs())


def after_accumulation(model):
    losses = []
    for rows in (3, 4):
        losses.append(model(inputs(rows)).square().sum())
        losses[-1].backward()
    return losses


def after_a_forward_whose_output_is_gone(model):
    model(inputs()).square().sum()


def after_a_cycle_that_held_the_output(model):
    held = [model(inputs()).square().sum()]
    held.append(held)


def after_inference(model):
    with torch.no_grad():
        model(inputs())  # torch cannot train what was gathered first in inference mode
    with torch.inference_mode():
        return model(inputs())


IDLE = [
    after_backward,
    after_backward_and_evaluation,
    after_evaluation,
    after_accumulation,
    after_a_forward_whose_output_is_gone,
    after_a_cycle_that_held_the_output,
    after_inference,
]


def wrong_when_idle(wrapping, run, before, change):
    """No refusal, and the next step is that of a model that did not run before."""
    model, fresh = made(wrapping), made(wrapping)
    before(model)
    before(fresh)
    kept = run(model)
    change(model)
    change(fresh)
    for parameter in model.parameters():
        parameter.grad = None
    outputs = [each(inputs()) for each in (model, fresh)]
    found = [] if torch.equal(*outputs) else ["outputs differ"]
    for output in outputs:
        output.square().sum().backward()
    del kept
    return found + different_gradients(model, fresh)


@pytest.mark.parametrize(
    ("wrapping", "run", "change"),
    [
        (wrapping, run, change)
        for turn, (wrapping, run) in enumerate(
            product(["fsdp2-2", "fsdp2_root-2", "fsdp1-2", "fsdp1_flat-2"], IDLE)
        )
        for change in every(3, ["a first pruning", "a second pruning", "remove"], turn)
    ],
)
def test_no_false_alarm(wrapping, run, change):
    assert_nothing_wrong(run_ranks(wrong_when_idle, 2, wrapping, run, *CHANGES[change]))


def checkpointed(wrapping, impl):
    model = seeded(Net())
    for name, layer in list(model.named_children()):
        setattr(model, name, checkpoint_wrapper(layer, checkpoint_impl=impl))
    return wrappings.wrap(model, wrapping)


def wrong_with_checkpointing(is_pending):
    model = checkpointed("fsdp2_root-2", CheckpointImpl.NO_REENTRANT)
    inner = [model.l1, model.l2, model.l3]
    targets = [(layer._checkpoint_wrapped_module, "weight") for layer in inner]
    loss, calls = model(inputs()).square().sum(), []
    handle = targets[0][0].register_forward_pre_hook(lambda *_: calls.append(1))
    if not is_pending:
        loss.backward()
        calls.clear()
    try:
        prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    except RuntimeError as error:
        is_refused = "still to come" in str(error)
    else:
        is_refused = False
    handle.remove()
    found = [] if is_refused == is_pending else [f"refused: {is_refused}"]
    return found + ["a forward ran again to find out"] * len(calls)


@pytest.mark.parametrize("is_pending", [True, False])
def test_activation_checkpointing(is_pending):
    assert_nothing_wrong(run_ranks(wrong_with_checkpointing, 2, is_pending))


def wrong_with_frozen(wrapping):
    """The gradient of what comes before a frozen layer depends on its weight."""
    model = seeded(Net())
    model.l2.requires_grad_(False)
    model = wrappings.wrap(model, wrapping)
    loss = model(inputs()).square().sum()
    try:
        prune.l1_unstructured(layers(model)[1], "weight", 0.5)
    except RuntimeError as error:
        return [] if "still to come" in str(error) else [str(error)]
    del loss
    return ["not refused"]


def test_frozen_weights_are_part_of_a_backward():
    assert_nothing_wrong(run_ranks(wrong_with_frozen, 2, "fsdp2-2"))


def wrong_in_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = made("fsdp2-2", mp_policy=policy)
    loss = model(inputs()).square().sum()
    try:
        prune_all(model)
        return ["not refused"]
    except RuntimeError:
        pass
    loss.backward()
    prune_all(model)
    return []


def test_mixed_precision():
    assert_nothing_wrong(run_ranks(wrong_in_mixed_precision, 2))


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


@pytest.mark.parametrize("wrapping", [*OTHERS, "fsdp2-2", "fsdp1-2"])
def test_a_state_dict_taken_before_remove(wrapping):
    """It keeps its values, as in torch, but for FSDP2, whose shards are written to."""
    of_shards = [f"l{number}.weight_orig" for number in (1, 2, 3)]
    expected = of_shards if wrapping == "fsdp2-2" else []
    for changed in run_ranks(changed_by_remove, wrappings.world_size(wrapping), wrapping):
        assert changed == expected


def wrong_about_another_model():
    """A live graph of one model says nothing about another one."""
    teacher, student = made("fsdp2-2"), made("fsdp2-2")
    loss = teacher(inputs()).square().sum()
    prune_all(student)
    loss.backward()
    return [] if isinstance(layers(student)[0], nn.Linear) else ["not pruned"]


def test_graphs_of_another_model():
    assert_nothing_wrong(run_ranks(wrong_about_another_model, 2))
