"""verify: what a model has to match, what it costs, and what it finds.

That nothing is found on healthy models is checked after operations of random_sequences.
"""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distprune as prune
from distprune.base.naming import named_modules
from distprune.masks.hook import unregister
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, raised
from helpers.models import Net, seeded
from helpers.sampling import on_each


def make(wrapping: str) -> nn.Module:
    model = seeded(Net(wrappings.runnable_sizes(wrapping)))
    return wrappings.wrap(model, wrapping)


def prune_all(model: nn.Module, amount: float = 0.5) -> prune.PruningReport:
    return prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=amount)


def save(wrapping: str, path: str, with_records: bool) -> None:
    model = make(wrapping)
    prune_all(model, 0.3)
    state = prune.checkpoint.get_state_dict(model)
    if not with_records:  # as earlier versions wrote it
        del state["masks"]
    dcp.save(state, checkpoint_id=path)


def load(wrapping: str, path: str, with_records: bool) -> list[str]:
    wrong = []
    for amount in (None, 0.5):
        model = make(wrapping)
        if amount is not None:
            prune_all(model, amount)
        prune.checkpoint.load(path, model)
        wrong += [f"loaded, pruned before: {amount}"] * (not prune.verify(model).ok)
        wrappings.local(prune.select(model, "l1")[0][0].weight_mask).fill_(1)
        if prune.verify(model, raise_errors=False).ok == with_records:
            wrong.append("a mask that changed after loading is not told")
    return wrong


@pytest.mark.parametrize("first, second", [("fsdp2-3", "fsdp1-2"), ("fsdp2-2", "plain-1")])
@pytest.mark.parametrize("with_records", [True, False])
def test_checkpoints_tell_what_was_known_of_the_masks(first, second, with_records, tmp_path):
    path = str(tmp_path / "checkpoint")
    run_ranks(save, wrappings.world_size(first), first, path, with_records)
    size = wrappings.world_size(second)
    assert_nothing_wrong(run_ranks(load, size, second, path, with_records))


def other_masks(wrapping: str) -> list[str]:
    model, other = make(wrapping), make(wrapping)
    prune_all(model, 0.5)
    prune_all(other, 0.2)
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    report = prune.verify(model, raise_errors=False)
    if report.ok or not all("changed since the last" in text for text in report.all_problems):
        return [str(report)]
    return []


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_masks_that_were_loaded_by_hand_are_told(wrapping):
    assert_nothing_wrong_on(wrapping, other_masks)


def test_what_is_expected_and_missing_is_told():
    model = make("plain-1")
    prune_all(model)
    fresh = make("plain-1")
    with pytest.raises(prune.VerificationError, match=r"l2.weight: it is expected to be pruned"):
        prune.verify(fresh, expected=["l2.weight"])
    with pytest.raises(prune.VerificationError, match="nothing is pruned"):
        prune.verify(fresh)
    assert prune.verify(fresh, expected=()).ok
    assert prune.verify(model, expected=["l1.weight", "l2.weight"]).ok
    assert prune.verify(model, expected=prune.select(model)).ok
    with pytest.raises(prune.VerificationError, match=r"l1.bias: it is expected"):
        prune.verify(model, expected=[*prune.select(model), "l1.bias"])
    with pytest.raises(TypeError, match=r"expected\[0\] is 1"):
        prune.verify(model, expected=[1])
    with pytest.raises(TypeError, match="model is a list"):
        prune.verify([model])


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "moved", "submodule", "outer"])
def test_copies_and_parts_of_a_plain_model_are_fine(how):
    model = nn.Sequential(make("plain-1"), nn.Linear(3, 3))
    prune_all(model)
    assert prune.verify(model).ok
    match how:
        case "deepcopy":
            model = copy.deepcopy(model)
        case "pickle":
            model = pickle.loads(pickle.dumps(model))
        case "moved":
            model = model.double()
        case "submodule":
            model = model[0]
        case "outer":
            model = nn.Sequential(nn.Identity(), model)
    assert prune.verify(model).ok
    model(torch.ones(1, 6, dtype=next(model.parameters()).dtype))
    assert prune.verify(model).ok
    assert prune.verify(copy.deepcopy(model)).ok


def traffic(wrapping: str) -> tuple[int, int, int, list[str], str]:
    model = make(wrapping)
    prune_all(model)
    with Traffic() as seen:
        report = prune.verify(model)
    kinds = sorted({name for name, _ in seen.calls})
    data = report.to_dict()
    assert data["ok"] and data["num_pruned"] == report.num_pruned
    table = "\n".join(str(report).splitlines()[:-1])
    return report.num_collectives, report.bytes_sent, seen.num_bytes, kinds, table


@pytest.mark.parametrize("wrapping", ["ddp-2", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_it_takes_a_few_small_all_reduces(wrapping):
    first, *others = run_ranks(traffic, wrappings.world_size(wrapping), wrapping)
    assert all(other == first for other in others)
    num_collectives, reported, seen, kinds, _ = first
    assert num_collectives == 4 and reported == seen and kinds == ["allreduce_"]
    assert seen <= 200 * 3 + 200


# verify: whatever stops a mask from acting, or changes it, is found on every rank.


WRAPPINGS = ["plain-1", "ddp-2", "fsdp1-2", "fsdp1_flat-2", "fsdp2-2", "hsdp-2x2", "tp-2"]
SIZES = (6, 6, 6, 6)  # so that parameters can be exchanged
NAME = "l1.weight"


def make_of_mutations(wrapping: str) -> nn.Module:
    model = wrappings.wrap(seeded(Net(SIZES)), wrapping)
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
    return model


def inner(model: nn.Module, name: str) -> nn.Module:
    return dict(named_modules(model))[name]


def layer(model) -> nn.Module:
    return inner(model, "l1")


def mask(model) -> Tensor:
    return wrappings.local(layer(model).weight_mask).view(-1)


def weight(model) -> Tensor:
    return wrappings.local(wrappings.stored(layer(model), "weight")).view(-1)


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
    plain = seeded(Net(SIZES))
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
    pairs = [(inner(model, name), "weight") for name in ("l2", "l1")]
    calls = {
        "select": lambda: prune.select(model, everything=True),
        "prune one": lambda: prune.l1_unstructured(pruned, "weight", 0.1),
        "prune all": lambda: prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.1),
        "remove": lambda: prune.remove(pruned, "weight"),
        "forward": lambda: model(torch.ones(2, 6)),
    }
    wrong = []
    for what, call in calls.items():
        text = raised(call)
        is_told = text.startswith("RuntimeError: ") and "Linear.weight is pruned" in text
        wrong += [f"{what}: {text}"] * (not is_told)
    return wrong


def verified(wrapping: str, mutations: list, only_last_rank: bool, trained: bool) -> list:
    """Per mutation: what verify raised on this rank, or nothing."""
    results = []
    for mutation in mutations:
        if (wrappings.kind_of(wrapping), mutation) in SKIPPED:
            continue
        model = make_of_mutations(wrapping)
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


def found_on(wrapping: str, mutations: list, only_last_rank=False, trained=False) -> list:
    """What verify raises of each mutation, on every rank the same, with the name."""
    size, wrong = wrappings.world_size(wrapping), []
    per_rank = run_ranks(verified, size, wrapping, mutations, only_last_rank, trained, timeout=60)
    for found in zip(*per_rank, strict=True):
        name, text = found[0]
        if any(other != found[0] for other in found):
            wrong.append(f"{name}: ranks raise different texts: {found}")
        elif text is None or NAME not in text:
            wrong.append(f"{name}: {text}")
    assert not wrong, "\n".join(wrong)
    return per_rank[0]


@pytest.mark.parametrize(("wrapping", "trained"), on_each(WRAPPINGS, 2, [False, True]))
def test_mutations_on_all_ranks_are_found(wrapping, trained):
    found_on(wrapping, EVERYWHERE, trained=trained)


@pytest.mark.parametrize("wrapping", WRAPPINGS[1:])
def test_mutations_on_one_rank_are_found(wrapping):
    found = found_on(wrapping, ONE_RANK, only_last_rank=True)
    if wrappings.world_size(wrapping) == 2:
        assert all("rank 1" in text for _, text in found[3:])


@pytest.mark.whole
@pytest.mark.parametrize("wrapping", sorted({wrapping for on in SOME.values() for wrapping in on}))
def test_mutations_of_some_wrappers_are_found(wrapping):
    found_on(wrapping, [mutation for mutation, on in SOME.items() if wrapping in on])


@pytest.mark.parametrize("wrapping", ["plain-2", "ddp-2", "hsdp-2x2"])
def test_one_weight_of_one_replica_is_found(wrapping):
    ((_, text),) = found_on(wrapping, ["another weight"], only_last_rank=True, trained=True)
    assert "different weights" in text
