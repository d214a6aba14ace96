"""verify: whatever stops a mask from acting, or changes it, is found on every rank.

A mutation is done to a model on all ranks or on the last one only; verify raises on every rank
then, the same text, which names the parameter.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distprune as prune
from distprune.base.naming import named_modules
from distprune.masks.hook import unregister
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.models import Net, fill
from helpers.sampling import every

WRAPPINGS = ["plain-1", "ddp-2", "fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "hsdp-2x2", "tp-2"]
SIZES = (6, 6, 6, 6)  # so that parameters can be exchanged
NAME = "l1.weight"


def make(wrapping: str) -> nn.Module:
    model = wrappings.wrap(fill(Net(SIZES), "normal", "float32"), wrapping)
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
    return model


def inner(model: nn.Module, name: str) -> nn.Module:
    return dict(named_modules(model))[name]


def values(tensor: Tensor) -> Tensor:
    return wrappings.local(tensor)


def layer(model) -> nn.Module:
    return inner(model, "l1")


def mask(model) -> Tensor:
    return values(layer(model).weight_mask).view(-1)


def weight(model) -> Tensor:
    return values(wrappings.stored(layer(model), "weight")).view(-1)


def exchange(model, kind):
    own = mask(model)
    kept, pruned = int((own != 0).nonzero()[0]), int((own == 0).nonzero()[0])
    own[kept], own[pruned] = 0, 1


def half(model, kind):
    module = layer(model)
    if module.weight_mask.dtype is torch.bool:  # of a DTensor
        module._buffers["weight_mask"] = module.weight_mask.float()
    mask(model).mul_(0.5)


def assign_whole(model, kind):
    names = ("weight_orig" if kind in ("plain", "ddp") else "weight", "weight_mask")
    state = {name: torch.ones(6, 6) for name in names}
    if kind in ("plain", "ddp"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in state.items()}
    with contextlib.suppress(AttributeError):  # of FSDP2, half way through
        layer(model).load_state_dict(state, strict=False, assign=True)


def wrap_anew(model, kind):
    """A model that was pruned first and wrapped second, without masks_aside."""
    plain = fill(Net(SIZES), "normal", "float32")
    prune.global_unstructured(prune.select(plain), prune.L1Unstructured, amount=0.5)
    if kind != "tp":
        return wrappings.wrap(plain, f"{kind}-2")
    return parallelize_module(plain, init_device_mesh("cpu", (2,)), {"l1": ColwiseParallel()})


def parameter_in_its_place(model, kind):
    if kind in ("plain", "ddp"):
        layer(model).weight = nn.Parameter(torch.ones(6, 6))
    else:
        layer(model)._parameters["weight"] = nn.Parameter(torch.ones(6, 6))


def share(model, kind):
    other = inner(model, "l3")
    prune.remove(other, "weight")
    other._parameters["weight"] = wrappings.stored(layer(model), "weight")


MUTATIONS = {
    "flip": lambda model, kind: mask(model)[:1].copy_(1 - mask(model)[:1].int()),
    "ones": lambda model, kind: mask(model).fill_(1),
    "zeros": lambda model, kind: mask(model).fill_(0),
    "exchange": exchange,
    "half": half,
    "another mask": lambda model, kind: setattr(
        layer(model), "weight_mask", torch.ones_like(layer(model).weight_mask)
    ),
    "no hook of the mask": lambda model, kind: unregister(layer(model), "weight"),
    "no hook": lambda model, kind: layer(model)._forward_pre_hooks.clear(),
    "another submodule": lambda model, kind: setattr(
        wrappings.unwrapped(model), "l1", nn.Linear(6, 6)
    ),
    # Without use_orig_params what is there is a view of memory that was freed.
    "another parameter": lambda model, kind: layer(model)._parameters.update(
        weight=nn.Parameter(
            torch.ones(6, 6) if kind == "fsdp1_flat" else layer(model).weight.detach().clone()
        )
    ),
    "assign": assign_whole,
    "assign a mask": lambda model, kind: layer(model)._buffers.update(
        weight_mask=torch.ones(6, 6, 1, dtype=torch.bool)
    ),
    "wrap anew": wrap_anew,
    "a parameter in its place": parameter_in_its_place,
    "no buffer": lambda model, kind: layer(model)._buffers.pop("weight_mask"),
    "no mask": lambda model, kind: setattr(layer(model), "weight_mask", None),
    "nothing": lambda model, kind: (
        layer(model)._buffers.pop("weight_mask"), layer(model)._forward_pre_hooks.clear()
    ),
    "write to the product": lambda model, kind: layer(model).weight.data.fill_(1.0),
    "share": share,
    "NaN": lambda model, kind: weight(model).masked_fill_(mask(model) == 0, torch.nan),
    "another weight": lambda model, kind: weight(model)[:1].add_(1e-3),
}  # fmt: skip
EVERYWHERE = [  # on every wrapper
    "flip", "ones", "zeros", "exchange", "another mask", "no hook of the mask", "no hook", "assign",
    "assign a mask", "a parameter in its place", "no buffer", "no mask", "share",
]  # fmt: skip
SOME = {
    "half": ["plain-1", "ddp-2", "tp-2"],
    "write to the product": ["plain-1", "ddp-2"],
    "wrap anew": ["fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "tp-2"],
    "another parameter": ["fsdp1-2", "fsdp1_flat-2", "fsdp2-2"],
    "nothing": ["fsdp1-2", "fsdp2-2", "tp-2"],
    "NaN": ["plain-1", "fsdp2-2", "tp-2", "fsdp1-2"],
}
ONE_RANK = [
    "flip", "ones", "exchange", "no hook of the mask", "another submodule", "assign a mask",
    "a parameter in its place", "no buffer", "no mask", "nothing",
]  # fmt: skip
# Of FSDP1 without use_orig_params no parameter is registered that could be swapped.
SKIPPED = [("fsdp1_flat", "assign"), ("fsdp1_flat", "share"), ("fsdp1", "assign")]


def calls_without_a_mask(model: nn.Module) -> list[str]:
    """What other calls say of a mask buffer that was deleted; nothing if they name it."""
    pruned = layer(model)
    calls = {
        "select": lambda: prune.select(model, everything=True),
        "prune one": lambda: prune.l1_unstructured(pruned, "weight", 0.1),
        "prune all": lambda: prune.global_unstructured(
            [(inner(model, name), "weight") for name in ("l2", "l1")],
            prune.L1Unstructured,
            amount=0.1,
        ),
        "remove": lambda: prune.remove(pruned, "weight"),
        "forward": lambda: model(torch.ones(2, 6)),
    }
    wrong = []
    for what, call in calls.items():
        try:
            call()
            wrong.append(f"{what}: nothing was raised")
        except Exception as error:
            is_told = isinstance(error, RuntimeError) and "Linear.weight is pruned" in str(error)
            wrong += [f"{what}: {error}"] * (not is_told)
    return wrong


def verified(wrapping: str, mutations: list, only_last_rank: bool, trained: bool) -> list:
    """Per mutation: what verify raised on this rank, or nothing."""
    results = []
    for mutation in mutations:
        if (wrappings.kind_of(wrapping), mutation) in SKIPPED:
            continue
        model = make(wrapping)
        if trained:
            model(torch.ones(2, 6)).sum().backward()
        prune.verify(model)
        if not only_last_rank or dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                other = MUTATIONS[mutation](model, wrappings.kind_of(wrapping))
            model = other if isinstance(other, nn.Module) else model
        try:
            prune.verify(model)
            results.append((mutation, None))
        except prune.VerificationError as error:
            text = str(error)
            assert not error.report.ok and "cannot be read" not in text, text
            results.append((mutation, text))
        if mutation in ("no buffer", "no mask") and not only_last_rank:
            wrong = calls_without_a_mask(model)
            assert not wrong, wrong
        if dist.get_world_size() > 1:
            dist.barrier()
    return results


def missed(per_rank: list[list]) -> list[str]:
    wrong = []
    for found in zip(*per_rank, strict=True):
        name, text = found[0]
        if any(other != found[0] for other in found):
            wrong.append(f"{name}: ranks raise different texts: {found}")
        elif text is None or NAME not in text:
            wrong.append(f"{name}: {text}")
    return wrong


@pytest.mark.parametrize(
    ("wrapping", "trained"),
    [
        (wrapping, trained)
        for turn, wrapping in enumerate(WRAPPINGS)
        for trained in every(2, [False, True], turn)
    ],
)
def test_mutations_on_all_ranks_are_found(wrapping, trained):
    size = wrappings.world_size(wrapping)
    found = run_ranks(verified, size, wrapping, EVERYWHERE, False, trained, timeout=60)
    assert not missed(found), "\n".join(missed(found))


@pytest.mark.parametrize("wrapping", WRAPPINGS[1:])
def test_mutations_on_one_rank_are_found(wrapping):
    size = wrappings.world_size(wrapping)
    found = run_ranks(verified, size, wrapping, ONE_RANK, True, False, timeout=60)
    assert not missed(found), "\n".join(missed(found))
    if size == 2:
        assert all("rank 1" in text for _, text in found[0][3:])


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", sorted({wrapping for on in SOME.values() for wrapping in on}))
def test_mutations_of_some_wrappers_are_found(wrapping):
    mutations = [mutation for mutation, on in SOME.items() if wrapping in on]
    size = wrappings.world_size(wrapping)
    found = run_ranks(verified, size, wrapping, mutations, False, False, timeout=60)
    assert not missed(found), "\n".join(missed(found))


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "hsdp-2x2"])
def test_one_weight_of_one_replica_is_found(wrapping):
    size = wrappings.world_size(wrapping)
    found = run_ranks(verified, size, wrapping, ["another weight"], True, True, timeout=60)
    assert not missed(found), "\n".join(missed(found))
    assert "different weights" in found[0][0][1]
