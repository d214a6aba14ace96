"""What takes FSDP2's tensors away: the mask acts on, or the forward says that it cannot."""

import re

import pytest
import torch
import torch.nn.utils.prune as torch_prune

import distprune as prune
import reference
import wraps
from distprune.testing import run_ranks
from models import Net, fill, target

NAMES = ["l1.weight", "l3.weight"]


def pruned_pair(wrapping: str):
    """The sharded model and a dense one, pruned by torch with the same masks."""
    dense = fill(Net(), "normal", "float32")
    model = wraps.wrap(fill(Net(), "normal", "float32"), wrapping)
    keeps = reference.prune([dense.get_parameter(name) for name in NAMES], 0.5)
    for name, keep in zip(NAMES, keeps, strict=True):
        torch_prune.custom_from_mask(*target(dense, name), keep)
    targets = [target(model, name) for name in NAMES]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    return model, dense, targets


def replace_tensors(model: torch.nn.Module, dense: torch.nn.Module, how: str) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    match how:
        case "load":
            model.load_state_dict(state)
        case "load, assigned":
            model.load_state_dict(state, assign=True)
        case "emptied":
            model.to_empty(device="cpu")
            model.load_state_dict(state)
        case "float64":
            model.double()
            dense.double()


def outcome(wrapping: str, how: str, forward_first: bool) -> tuple[str, str]:
    """What forward does then, and what it does after the masks have been set again."""
    model, dense, targets = pruned_pair(wrapping)
    x = torch.ones(2, 6)
    if forward_first:
        model(x).sum().backward()
        model.zero_grad()
    replace_tensors(model, dense, how)
    x = x.to(dense.l2.weight.dtype)
    first = compare(model, dense, x)
    for module, name in targets:
        prune.custom_from_mask(module, name, getattr(module, name + "_mask"))
    return first, compare(model, dense, x)


def compare(model: torch.nn.Module, dense: torch.nn.Module, x: torch.Tensor) -> str:
    try:
        out = model(x)
    except RuntimeError as error:
        return str(error)
    out.sum().backward()
    for module, name in [target(model, name) for name in NAMES]:
        mask, gradient = getattr(module, name + "_mask"), getattr(module, name + "_orig").grad
        if wraps.local(gradient)[wraps.local(mask) == 0].any():
            return "a pruned element has a gradient"
    return "equal" if torch.allclose(out, dense(x), atol=1e-6) else "other outputs"


@pytest.mark.parametrize("forward_first", [False, True])
@pytest.mark.parametrize("how", ["load", "load, assigned", "emptied", "float64"])
@pytest.mark.parametrize("wrapping", ["fsdp2-2", "fsdp2_root-2", "fsdp2-3", "hsdp-2x2"])
def test_the_mask_acts_or_forward_raises(wrapping, how, forward_first):
    if how == "float64" and forward_first:
        pytest.skip("torch's FSDP2 cannot change the dtype after a forward, pruned or not")
    for first, again in run_ranks(
        outcome, wraps.world_size(wrapping), wrapping, how, forward_first
    ):
        assert first == "equal" or re.search("mask of .*weight no longer acts", first), first
        assert first == "equal" or how != "load"
        assert again == "equal"
