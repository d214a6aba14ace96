"""FSDP1's LOCAL_STATE_DICT of a pruned model, each rank's own part, loads into such a model."""

import pytest
import torch
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, StateDictType

import distprune as prune
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong_on, wrong_masks
from helpers.models import Net, fill, target

NAMES = ["l1.weight", "l2.weight", "l3.bias"]
WRAPPINGS = ["fsdp1-2", "fsdp1-3", "fsdp1_root-3", "fsdp1_flat-2"]


def pruned(wrapping: str, values: str, amount: float, seed: int = 0) -> torch.nn.Module:
    model = fill(Net(wrappings.runnable_sizes(wrapping)), values, "float32", seed=seed)
    model = wrappings.wrap(model, wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
    return model


def local_state(model: torch.nn.Module) -> dict:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict()


def load_local(model: torch.nn.Module, state: dict) -> None:
    # With use_orig_params=True torch writes "_flat_param", too, and does not know it again.
    is_flat = any(isinstance(p, FlatParameter) for p in model.parameters())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        keys = model.load_state_dict(state, strict=is_flat)
    assert not keys.missing_keys and all("_flat_param" in key for key in keys.unexpected_keys), keys


def problems(wrapping: str) -> list[str]:
    """Into a model of other weights and masks, that has run already."""
    x, wrong = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)), []
    model, other = pruned(wrapping, "normal", 0.5), pruned(wrapping, "few", 0.1, seed=9)
    dense = Net(wrappings.runnable_sizes(wrapping))
    indices = wrappings.local_indices(dense, wrapping)
    with torch.no_grad():
        expected = model(x)
        if torch.equal(other(x), expected):
            wrong.append("both models are the same")
    keeps = keeps_of(model, indices, wrapping)
    load_local(other, local_state(model))
    wrong += wrong_masks(other, keeps, indices)
    with torch.no_grad():
        if not torch.equal(other(x), expected):
            wrong.append("other outputs")
    # A mask of another length is told by its name, and by the length that it should have.
    state = local_state(model)
    key = next(key for key in state if key.endswith("l1.weight_mask"))
    state[key] = torch.ones(len(state[key]) + 1, dtype=torch.bool)
    try:
        load_local(other, state)
        wrong.append("a mask of another length was loaded")
    except RuntimeError as error:
        if f"expected this rank's {len(state[key]) - 1} elements of the mask" not in str(error):
            wrong.append(str(error))
    return wrong


def keeps_of(model, indices, wrapping) -> dict[str, torch.Tensor]:
    """Whole masks, of which each rank knows its own part."""
    keeps = {}
    for name in NAMES:
        module, parameter = target(wrappings.unwrapped(model), name)
        whole = torch.zeros(Net(wrappings.runnable_sizes(wrapping)).get_parameter(name).numel())
        whole[indices[name]] = getattr(module, parameter + "_mask").float()
        keeps[name] = whole.bool()
    return keeps


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_it_loads_into_a_model_of_other_masks(wrapping):
    assert_nothing_wrong_on(wrapping, problems)
