"""Zeros are held in shards, whoever writes them: optimizers, loaders, averages.

That training with them is that of one process with zeros: test_training.py.
"""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

import distprune as prune
from distprune.base.naming import unwrap
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import Net, seeded, target

NAMES = ["l1.weight", "l2.weight"]
WRAPPINGS = [
    "fsdp2-2", "fsdp2_root-3", "hsdp-2x2", "fsdp2_tp-2x2", "tp-2", "fsdp1-2", "fsdp1_flat-2",
]  # fmt: skip
OPTIMIZERS = {
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
}


class Case:
    """A model that was trained, and pruned then."""

    def __init__(self, wrapping: str):
        self.sizes = sizes = wrappings.runnable_sizes(wrapping)
        self.wrapping, self.x = wrapping, torch.ones(4, sizes[0])
        self.dense = seeded(Net(sizes), 3)
        self.indices = wrappings.local_indices(self.dense, wrapping)
        self.model = wrappings.wrap(seeded(Net(sizes)), wrapping)
        is_mixed = wrappings.kind_of(wrapping) == "tp"  # torch takes no list of both kinds
        self.optimizers = {
            name: make(
                [p for p in self.model.parameters() if not is_mixed or hasattr(p, "placements")]
            )
            for name, make in OPTIMIZERS.items()
        }
        for optimizer in self.optimizers.values():
            self.backward()
            optimizer.step()
        self.places = [target(wrappings.unwrapped(self.model), name) for name in NAMES]
        prune.global_unstructured(self.places, prune.L1Unstructured, amount=0.6)

    def backward(self) -> None:
        self.model.zero_grad()
        F.mse_loss(self.model(self.x), torch.ones(4, 3)).backward()

    def held(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(values, mask) of what this rank stores."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root keeps what an evaluation has gathered
        masks = [wrappings.local(unwrap(m)._buffers[f"{name}_mask"]) for m, name in self.places]
        values = [wrappings.shard(self.model, name, self.indices) for name in NAMES]
        return list(zip(values, masks, strict=True))

    def dirty(self) -> bool:
        pruned = torch.cat([values[~mask].view(-1) for values, mask in self.held()])
        return bool((pruned.signbit() | (pruned != 0)).any())

    def write(self) -> None:
        for values, mask in self.held():  # a product with the mask would leave NaN
            values.data[~mask] = torch.nan

    def states(self) -> tuple[dict, dict]:
        """The model's state dict, and that of another dense model, laid out like it."""
        other = wrappings.wrap(seeded(Net(self.sizes), 3), self.wrapping)
        return get_model_state_dict(self.model), get_model_state_dict(other)


def written(wrapping: str) -> list[str]:
    case, wrong = Case(wrapping), []
    wrong += ["not zero after the pruning"] * case.dirty()
    for name, optimizer in case.optimizers.items():
        case.backward()
        optimizer.step()
        wrong += [f"not zero after a step, {name}"] * case.dirty()
    case.write()
    wrong += ["the test has written nothing"] * (not case.dirty() and case.held()[0][0].numel() > 0)
    with torch.no_grad():
        case.model(case.x)
    wrong += ["not zero after a forward"] * case.dirty()
    case.write()
    prune.hold_zeros(case.model)
    wrong += ["not zero after hold_zeros"] * case.dirty()
    if wrapping.startswith("fsdp1"):  # torch's whole state dicts need an accelerator there
        return wrong
    case.write()
    case.model.state_dict()
    wrong += ["not zero in a state dict"] * case.dirty()
    mine, dense = case.states()
    set_model_state_dict(case.model, {**mine, **dense})
    wrong += ["not zero after set_model_state_dict"] * case.dirty()
    loaded = {key: value.clone() for key, value in dense.items()}
    case.model.load_state_dict(loaded, strict=False, assign=True)
    wrong += ["not zero after an assignment"] * case.dirty()
    case.backward()
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.sub_(parameter.grad)  # an optimizer that is none of torch's
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    dcp.save(dense, checkpoint_id=folder[0])
    state = {key: value for key, value in get_model_state_dict(case.model).items() if key in dense}
    dcp.load(state, checkpoint_id=folder[0])
    with torch.no_grad():
        out = case.model(case.x)
    wrong += ["not zero after dcp.load and a forward"] * case.dirty()
    for (module, _), keep in zip(case.places, prune.get_masks(case.places), strict=True):
        layer = case.dense.get_submodule("l1" if module is case.places[0][0] else "l2")
        layer.weight.data.mul_(wrappings.whole(keep))
    if not torch.allclose(out, case.dense(case.x), atol=1e-5):
        wrong.append("the forward is not that of the loaded weights with zeros")
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_zeros_stay_whoever_writes(wrapping):
    assert_nothing_wrong_on(wrapping, written)


def kept_for_reconstruction(wrapping: str) -> list[str]:
    case = Case(wrapping)
    with prune.keep_pruned_values():
        prune.global_unstructured(case.places, prune.L1Unstructured, amount=0.5)
        wrong = ["the values are gone at once"] * (not case.dirty() and dist.get_rank() == 0)
    return wrong + ["not zero after the context"] * case.dirty()


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "tp-2", "fsdp1-2"])
def test_pruned_values_are_kept_inside_a_context_only(wrapping):
    assert_nothing_wrong_on(wrapping, kept_for_reconstruction)
