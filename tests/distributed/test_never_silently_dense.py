"""Whatever swaps the tensors of a pruned model, the masks act on, or forward raises."""

import copy
import pickle

import pytest
import torch
import torch.nn.utils.prune as torch_prune

import distprune as prune
from distprune.base.naming import named_modules
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.models import Net, fill, target

NAMES = ["l1.weight", "l3.weight"]


WRAPPINGS = ["plain-1", "ddp-2", "tp-2", "fsdp2-1", "fsdp2-2", "fsdp2_root-2", "fsdp2-3"]
WRAPPINGS += ["hsdp-2x2", "fsdp2_tp-2x2", "fsdp1-2", "fsdp1_root-3"]
HOW = ["load", "assign", "assign other masks", "to_empty, meta first", "to_empty, load"]
HOW += ["float64"]

TORCH_CANNOT = {  # pruned or not: they keep tensors that they saw when they were made
    "ddp": ["to_empty, meta first"],
    "fsdp1": ["to_empty, meta first", "float64"],
}


class Pair:
    """The sharded model and a dense one, pruned by torch with the same masks."""

    def __init__(self, wrapping: str, amount: float = 0.5):
        sizes = wrappings.runnable_sizes(wrapping)
        self.dense = fill(Net(sizes), "normal", "float32")
        self.indices = wrappings.local_indices(self.dense, wrapping)
        scores = [self.dense.get_parameter(name) for name in NAMES]
        self.keeps = dict(zip(NAMES, reference.prune(scores, amount), strict=True))
        self.model = wrappings.wrap(fill(Net(sizes), "normal", "float32"), wrapping)
        # FSDP1 loads through its own module; DDP adds a prefix to the names.
        is_ddp = wrappings.kind_of(wrapping) == "ddp"
        self.inner = self.model.module if is_ddp else self.model
        self.modules = dict(named_modules(self.model))
        for name, keep in self.keeps.items():
            torch_prune.custom_from_mask(*target(self.dense, name), keep)
        targets = [self.target(name) for name in NAMES]
        prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)

    def target(self, name: str) -> tuple[torch.nn.Module, str]:
        path, _, parameter = name.rpartition(".")
        return self.modules[path], parameter

    def wrong(self, when: str) -> list[str]:
        """Masks, outputs and gradients."""
        wrong = wrong_masks(self.model, self.keeps, self.indices, when)
        if "other masks" not in when and not prune.verify(self.model, raise_errors=False).ok:
            wrong.append(f"{when}: {prune.verify(self.model, raise_errors=False)}")
        x = torch.ones(2, 6, dtype=self.dense.l2.weight.dtype)
        for _ in range(2):
            out = self.model(x)
            out.sum().backward()
        if not torch.allclose(out, self.dense(x), atol=1e-6):
            wrong.append(f"{when}: other outputs")
        for module, name in [self.target(name) for name in NAMES]:
            mask, gradient = getattr(module, name + "_mask"), wrappings.stored(module, name).grad
            if mask.numel() and wrappings.local(gradient)[wrappings.local(mask) == 0].any():
                wrong.append(f"{when}: a pruned element has a gradient")
        self.model.zero_grad()
        return wrong


def replace_tensors(pair: Pair, wrapping: str, how: str) -> None:
    model = pair.inner
    state = {name: value.clone() for name, value in model.state_dict().items()}
    match how:
        case "load":
            model.load_state_dict(state)
        case "assign":
            model.load_state_dict(state, assign=True)
        case "assign other masks":
            other = Pair(wrapping, 0.2)
            model.load_state_dict(copy.deepcopy(other.inner.state_dict()), assign=True)
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


def problems(wrapping: str, forward_first: bool) -> list[str]:
    wrong = []
    for how in HOW:
        if how in TORCH_CANNOT.get(wrappings.kind_of(wrapping)[:5], ()):
            continue
        if how == "float64" and forward_first and wrapping.startswith(("fsdp2", "hsdp")):
            continue  # torch's FSDP2 cannot change the dtype after a forward, pruned or not
        pair = Pair(wrapping)
        if forward_first:
            pair.model(torch.ones(2, 6)).sum().backward()
            pair.model.zero_grad()
        replace_tensors(pair, wrapping, how)
        wrong += pair.wrong(f"{how}, forward_first={forward_first}")
        for module, name in [pair.target(name) for name in NAMES]:
            prune.remove(module, name)
            if any(key.startswith("_distprune") for key in vars(module)):
                wrong.append(f"{how}: something is left on the module")
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_masks_survive(wrapping):
    forward_first = (False, True) if wrappings.world_size(wrapping) <= 2 else (True,)
    for first in forward_first:
        assert_nothing_wrong_on(wrapping, problems, first)


def mask_of_another_layout() -> str:
    pair = Pair("fsdp2_root-2")
    pair.model(torch.ones(2, 6)).sum().backward()
    pair.inner.l1.weight_mask = torch.ones(10, 6)
    with pytest.raises(RuntimeError) as error:
        pair.model(torch.ones(2, 6))
    return str(error.value)


def test_forward_raises_where_masks_cannot_act():
    for replaced in run_ranks(mask_of_another_layout, 2):
        assert "Linear.weight was replaced" in replaced and "custom_from_mask" in replaced


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_their_own_masks(clone):
    pair = Pair("plain-1")
    twin = clone(pair.model)
    twin.double()
    for name, keep in pair.keeps.items():
        module, parameter = target(pair.model, name)
        assert getattr(module, parameter + "_mask").dtype == torch.float32
        module, parameter = target(twin, name)
        assert torch.equal(getattr(module, parameter + "_mask"), keep.double())
