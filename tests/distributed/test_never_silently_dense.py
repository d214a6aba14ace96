"""Whatever swaps the tensors of a pruned model, the masks act on, or forward raises."""

import copy
import pickle
from itertools import product

import pytest
import torch

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import target
from helpers.training_pair import Pair

WRAPPINGS = ["plain-1", "ddp-2", "tp-2", "fsdp2-1", "fsdp2-2", "fsdp2_root-2", "fsdp2-3"]
WRAPPINGS += ["hsdp-2x2", "fsdp2_tp-2x2", "fsdp1-2", "fsdp1_root-3"]
HOW = ["load", "assign", "assign other masks", "to_empty, meta first", "to_empty, load"]
HOW += ["float64"]

TORCH_CANNOT = {  # pruned or not: they keep tensors that they saw when they were made
    "ddp": ["to_empty, meta first"],
    "fsdp1": ["assign other masks", "to_empty, meta first", "float64"],
}


def inner_of(pair: Pair) -> torch.nn.Module:
    """FSDP1 loads through its own module; DDP adds a prefix to the names."""
    return pair.model.module if wrappings.kind_of(pair.wrapping) == "ddp" else pair.model


def pruned(wrapping: str, amount: float = 0.5) -> Pair:
    pair = Pair(wrapping)
    pair.prune(amount)
    return pair


def step(pair: Pair, when: str) -> None:
    """Masks, values, outputs and gradients, twice; every rank has the same batch."""
    pair.compare_values(when)
    x = torch.ones(2, pair.dense.l1.in_features, dtype=pair.dense.l2.bias.dtype)
    for _ in range(2):
        out, expected = pair.model(x), pair.dense(x)
        pair.close(out, expected, f"{when}: outputs")
        out.sum().backward()
        expected.sum().backward()
    pair.compare_gradients(when)
    pair.model.zero_grad()
    pair.dense.zero_grad()


def replace_tensors(pair: Pair, how: str) -> None:
    model = inner_of(pair)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    match how:
        case "load":
            model.load_state_dict(state)
        case "assign":
            model.load_state_dict(state, assign=True)
        case "assign other masks":
            other = pruned(pair.wrapping, 0.2)
            model.load_state_dict(copy.deepcopy(inner_of(other).state_dict()), assign=True)
            pair.dense, pair.keeps = other.dense, other.keeps
        case "to_empty, meta first":
            model.to("meta")
            model.to_empty(device="cpu")
            model.load_state_dict(state)
        case "to_empty, load":
            model.to_empty(device="cpu")
            model.load_state_dict(state)
        case "float64":
            model.double()
            pair.dense.double()


def problems(wrapping: str) -> list[str]:
    wrong = []
    first = (False, True) if wrappings.world_size(wrapping) <= 2 else (True,)
    for how, forward_first in product(HOW, first):
        if how in TORCH_CANNOT.get(wrappings.kind_of(wrapping)[:5], ()):
            continue
        if how == "float64" and forward_first and wrapping.startswith(("fsdp2", "hsdp")):
            continue  # torch's FSDP2 cannot change the dtype after a forward, pruned or not
        pair = pruned(wrapping)
        if forward_first:
            pair.model(torch.ones(2, 6)).sum().backward()
            pair.model.zero_grad()
        replace_tensors(pair, how)
        step(pair, f"{how}, forward_first={forward_first}")
        report = prune.verify(pair.model, raise_errors=False)
        if how != "assign other masks" and not report.ok:
            pair.wrong.append(f"{how}: {report}")
        pair.remove()
        left = [key for module in pair.model.modules() for key in vars(module)]
        pair.wrong += [f"{how}: left {key}" for key in left if key.startswith("_distprune")]
        wrong += pair.wrong
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_masks_survive(wrapping):
    assert_nothing_wrong_on(wrapping, problems)


def mask_of_another_layout() -> str:
    pair = pruned("fsdp2_root-2")
    pair.model(torch.ones(2, 6)).sum().backward()
    pair.model.l1.weight_mask = torch.ones(10, 6)
    with pytest.raises(RuntimeError) as error:
        pair.model(torch.ones(2, 6))
    return str(error.value)


def test_forward_raises_where_masks_cannot_act():
    for replaced in run_ranks(mask_of_another_layout, 2):
        assert "Linear.weight was replaced" in replaced and "custom_from_mask" in replaced


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_their_own_masks(clone):
    pair = pruned("plain-1")
    twin = clone(pair.model)
    twin.double()
    for name, keep in pair.keeps.items():
        module, parameter = target(pair.model, name)
        assert getattr(module, parameter + "_mask").dtype == torch.float32
        module, parameter = target(twin, name)
        assert torch.equal(getattr(module, parameter + "_mask"), keep.double())
