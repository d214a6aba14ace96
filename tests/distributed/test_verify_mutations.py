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


def flip(model, kind):
    mask = values(inner(model, "l1").weight_mask).view(-1)
    mask[0] = 1 - mask[0].int()


def fill_with_ones(model, kind):
    values(inner(model, "l1").weight_mask).fill_(1)


def fill_with_zeros(model, kind):
    values(inner(model, "l1").weight_mask).fill_(0)


def exchange(model, kind):
    mask = values(inner(model, "l1").weight_mask).view(-1)
    kept, pruned = int((mask != 0).nonzero()[0]), int((mask == 0).nonzero()[0])
    mask[kept], mask[pruned] = 0, 1


def half(model, kind):
    module = inner(model, "l1")
    if module.weight_mask.dtype is torch.bool:  # of a DTensor
        module._buffers["weight_mask"] = module.weight_mask.float()
    values(module.weight_mask).mul_(0.5)


def another_mask(model, kind):
    module = inner(model, "l1")
    module.weight_mask = torch.ones_like(module.weight_mask)


def drop_hook(model, kind):
    module = inner(model, "l1")
    unregister(module, "weight")


def drop_all_hooks(model, kind):
    inner(model, "l1")._forward_pre_hooks.clear()


def change_a_weight(model, kind):
    values_of_weight(model)[0] += 1e-3


def values_of_weight(model) -> Tensor:
    return values(wrappings.stored(inner(model, "l1"), "weight")).view(-1)


def replace_submodule(model, kind):
    wrappings.unwrapped(model).l1 = nn.Linear(6, 6)


def replace_parameter(model, kind):
    module = inner(model, "l1")
    if kind == "fsdp1_flat":  # what is there is a view of memory that was freed
        module._parameters["weight"] = nn.Parameter(torch.ones(6, 6))
        return
    module._parameters["weight"] = nn.Parameter(module.weight.detach().clone())


def assign_whole(model, kind):
    names = ("weight_orig" if kind in ("plain", "ddp") else "weight", "weight_mask")
    state = {name: torch.ones(6, 6) for name in names}
    if kind in ("plain", "ddp"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {name: distribute_tensor(t, mesh, [Replicate()]) for name, t in state.items()}
    with contextlib.suppress(AttributeError):  # of FSDP2, half way through
        inner(model, "l1").load_state_dict(state, strict=False, assign=True)


def assign_whole_mask(model, kind):
    inner(model, "l1")._buffers["weight_mask"] = torch.ones(6, 6, 1, dtype=torch.bool)


def wrap_anew(model, kind):
    """A model that was pruned first and wrapped second, without masks_aside."""
    plain = fill(Net(SIZES), "normal", "float32")
    prune.global_unstructured(prune.select(plain), prune.L1Unstructured, amount=0.5)
    if kind != "tp":
        return wrappings.wrap(plain, f"{kind}-2")
    mesh = init_device_mesh("cpu", (2,))
    return parallelize_module(plain, mesh, {"l1": ColwiseParallel()})


def parameter_in_its_place(model, kind):
    module = inner(model, "l1")
    if kind in ("plain", "ddp"):
        module.weight = nn.Parameter(torch.ones(6, 6))
    else:
        module._parameters["weight"] = nn.Parameter(torch.ones(6, 6))


def delete_mask(model, kind):
    del inner(model, "l1")._buffers["weight_mask"]


def no_mask(model, kind):
    inner(model, "l1").weight_mask = None


def delete_everything(model, kind):
    module = inner(model, "l1")
    del module._buffers["weight_mask"]
    module._forward_pre_hooks.clear()


def write_to_product(model, kind):
    inner(model, "l1").weight.data.fill_(1.0)


def share(model, kind):
    module, other = inner(model, "l1"), inner(model, "l3")
    prune.remove(other, "weight")
    shared = wrappings.stored(module, "weight")
    other._parameters.pop("weight", None)
    other._parameters["weight"] = shared


def nan_under_the_mask(model, kind):
    module = inner(model, "l1")
    mask = values(module.weight_mask)
    with torch.no_grad():
        values(wrappings.stored(module, "weight"))[mask == 0] = torch.nan


EVERYWHERE = [  # on every wrapper
    flip, fill_with_ones, fill_with_zeros, exchange, another_mask, drop_hook, drop_all_hooks,
    assign_whole, assign_whole_mask, parameter_in_its_place, delete_mask, no_mask, share,
]  # fmt: skip
SOME = [
    *[(half, wrapping) for wrapping in ("plain-1", "ddp-2", "tp-2")],
    *[(write_to_product, wrapping) for wrapping in ("plain-1", "ddp-2")],
    *[(wrap_anew, wrapping) for wrapping in ("fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "tp-2")],
    *[(replace_parameter, wrapping) for wrapping in ("fsdp1-2", "fsdp1_flat-2", "fsdp2-2")],
    *[(delete_everything, wrapping) for wrapping in ("fsdp1-2", "fsdp2-2", "tp-2")],
    *[(nan_under_the_mask, wrapping) for wrapping in ("plain-1", "fsdp2-2", "tp-2", "fsdp1-2")],
]
ONE_RANK = [
    flip, fill_with_ones, exchange, drop_hook, replace_submodule, assign_whole_mask,
    parameter_in_its_place, delete_mask, no_mask, delete_everything,
]  # fmt: skip
SKIPPED = {  # of FSDP1 without use_orig_params no parameter is registered that could be swapped
    ("fsdp1_flat", assign_whole),
    ("fsdp1_flat", share),
    ("fsdp1", assign_whole),
}


def calls_without_a_mask(model: nn.Module) -> list[str]:
    """What other calls say of a mask buffer that was deleted; nothing if they name it."""
    layer = inner(model, "l1")
    calls = {
        "select": lambda: prune.select(model, everything=True),
        "prune one": lambda: prune.l1_unstructured(layer, "weight", 0.1),
        "prune all": lambda: prune.global_unstructured(
            [(inner(model, name), "weight") for name in ("l2", "l1")],
            prune.L1Unstructured,
            amount=0.1,
        ),
        "remove": lambda: prune.remove(layer, "weight"),
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
            results.append((mutation.__name__, NAME + " (skipped)"))
            continue
        model = make(wrapping)
        if trained:
            model(torch.ones(2, 6)).sum().backward()
        prune.verify(model)
        if not only_last_rank or dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                model = mutation(model, wrappings.kind_of(wrapping)) or model
        try:
            prune.verify(model)
            results.append((mutation.__name__, None))
        except prune.VerificationError as error:
            text = str(error)
            assert not error.report.ok and "cannot be read" not in text, text
            results.append((mutation.__name__, text))
        if mutation in (delete_mask, no_mask) and not only_last_rank:
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
        assert all("rank 1" in text or "skipped" in text for _, text in found[0][3:])


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", sorted({wrapping for _, wrapping in SOME}))
def test_mutations_of_some_wrappers_are_found(wrapping):
    mutations = [mutation for mutation, on in SOME if on == wrapping]
    size = wrappings.world_size(wrapping)
    found = run_ranks(verified, size, wrapping, mutations, False, False, timeout=60)
    assert not missed(found), "\n".join(missed(found))


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "hsdp-2x2"])
def test_one_weight_of_one_replica_is_found(wrapping):
    size = wrappings.world_size(wrapping)
    found = run_ranks(verified, size, wrapping, [change_a_weight], True, True, timeout=60)
    assert not missed(found), "\n".join(missed(found))
    assert "different weights" in found[0][0][1]
