"""verify: what a model has to match, and what it costs; test_verify_mutations.py: what it finds.

That nothing is found on healthy models is checked after operations of random_sequences.
"""

import copy
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on
from helpers.models import Net, fill


def make(wrapping: str) -> nn.Module:
    model = fill(Net(wrappings.runnable_sizes(wrapping)), "normal", "float32")
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
    prune.verify(other, expected=prune.verify(other))
    return []


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_masks_that_were_loaded_by_hand_are_told(wrapping):
    assert_nothing_wrong_on(wrapping, other_masks)


def test_what_is_expected_and_missing_is_told():
    model = make("plain-1")
    report = prune_all(model)
    fresh = make("plain-1")
    with pytest.raises(prune.VerificationError, match=r"l2.weight: it is expected to be pruned"):
        prune.verify(fresh, expected=report)
    with pytest.raises(prune.VerificationError, match="nothing is pruned"):
        prune.verify(fresh)
    assert prune.verify(fresh, expected=()).ok
    assert prune.verify(model, expected=["l1.weight", "l2.weight"]).ok
    assert prune.verify(model, expected=prune.select(model)).ok
    with pytest.raises(prune.VerificationError, match=r"l1.bias: it is expected"):
        prune.verify(model, expected=[*prune.select(model), "l1.bias"])
    prune_all(model, 0.1)
    with pytest.raises(prune.VerificationError, match="as in the report"):
        prune.verify(model, expected=report)
    with pytest.raises(TypeError, match=r"expected\[0\] is 1"):
        prune.verify(model, expected=[1])
    with pytest.raises(TypeError, match="model is a list"):
        prune.verify([model])


def follow(wrapping: str) -> list[str]:
    model = make(wrapping)
    pruner = prune.schedule.ScheduledPruner(
        prune.select(model, "l1"), prune.schedule.OneShot(1, 0.5), verify_every=2
    )
    wrong = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(8):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 6:
            module, _ = prune.select(model, "l1")[0]
            mask = wrappings.local(module.weight_mask)
            mask.copy_(1 - mask.int())
        try:
            pruner.step()
        except prune.VerificationError as error:
            wrong.append(f"{step}: {'l1.weight' in str(error)}")
    return wrong if wrong != ["7: True"] or pruner.num_steps != 8 else []


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2-2"])
def test_a_schedule_verifies_every_few_steps(wrapping):
    assert_nothing_wrong_on(wrapping, follow)


def test_verify_every_is_a_number_of_steps():
    model = make("plain-1")
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="verify_every="):
            prune.schedule.ScheduledPruner(
                prune.select(model), prune.schedule.OneShot(1, 0.5), verify_every=wrong
            )


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
    data = json.loads(report.to_json())
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


@pytest.mark.parametrize("layer", ["lstm", "attention"])
def test_modules_that_read_their_weights_themselves(layer):
    model = nn.ModuleDict(
        {"lstm": nn.LSTM(4, 4)} if layer == "lstm" else {"attn": nn.MultiheadAttention(4, 2)}
    )
    names = ["weight_ih_l0", "weight_hh_l0"] if layer == "lstm" else ["in_proj_weight", "weight"]
    prune.global_unstructured(prune.select(model, names=names), prune.L1Unstructured, amount=0.5)
    x = torch.ones(2, 1, 4)
    for when in ("pruned", "forward", "stepped", "forward again"):
        assert prune.verify(model).ok, when
        if when != "stepped":
            out = model["lstm"](x)[0] if layer == "lstm" else model["attn"](x, x, x)[0]
            out.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    assert prune.verify(model).ok
