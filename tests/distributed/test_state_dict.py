"""What a mask is on each wrapper, and where it appears in state dicts."""

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune import checkpoint
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.models import UNEVEN, Net, fill, target

NAMES = ["l1.weight", "l2.weight", "l3.bias"]
WRAPPINGS = wrappings.sampled(wrappings.ALL)
FULL = StateDictOptions(full_state_dict=True)


def pruned(wrapping: str, dtype: str = "float32", sizes=UNEVEN) -> torch.nn.Module:
    model = wrappings.wrap(fill(Net(sizes), "normal", dtype), wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.5)
    return model


def pruned_by_torch(sizes=UNEVEN) -> torch.nn.Module:
    """A dense model with torch's own hooks and the masks of the reference."""
    model = fill(Net(sizes), "normal", "float32")
    keeps = reference.prune([model.get_parameter(name) for name in NAMES], 0.5)
    for name, keep in zip(NAMES, keeps, strict=True):
        torch_prune.custom_from_mask(*target(model, name), keep)
    return model


def without_orig(keys: set[str]) -> set[str]:
    return {key.removesuffix("_orig") for key in keys}


def mask_problems(wrapping: str, dtype: str, keys: list[set[str]]) -> list[str]:
    """Masks, and the keys of the state dict while it is pruned, and after remove."""
    wrapped = pruned(wrapping, dtype)
    model = wrappings.unwrapped(wrapped)
    fully_sharded = wrappings.kind_of(wrapping).startswith(("fsdp", "hsdp"))
    problems = []
    for name in NAMES:
        module, parameter = target(model, name)
        orig, mask = wrappings.stored(module, parameter), getattr(module, parameter + "_mask")
        if isinstance(mask, DTensor) != isinstance(orig, DTensor):
            problems.append(f"{name}: mask is {type(mask)}, parameter is {type(orig)}")
        elif isinstance(mask, DTensor):
            if mask.device_mesh != orig.device_mesh or mask.placements != orig.placements:
                problems.append(f"{name}: mask on {mask.device_mesh}, {mask.placements}")
            if mask.shape != orig.shape or mask.stride() != orig.stride():
                problems.append(f"{name}: mask {mask.shape}, {mask.stride()}")
        is_sharded = fully_sharded or isinstance(orig, DTensor)
        expected = torch.bool if is_sharded else orig.dtype
        if mask.dtype != expected:
            problems.append(f"{name}: mask is {mask.dtype}, not {expected}")
        if wrappings.local(mask).untyped_storage().nbytes() > wrappings.local(mask).nbytes:
            problems.append(f"{name}: mask is a view of something larger")
        if not any(buffer is mask for buffer in module.buffers()):
            problems.append(f"{name}: mask is no buffer")
        if mask.requires_grad:
            problems.append(f"{name}: mask requires a gradient")
    found = [set(model.state_dict())]
    for name in NAMES:
        prune.remove(*target(model, name))
    found.append(set(model.state_dict()))
    if fully_sharded:
        keys = [without_orig(each) for each in keys]
    elif wrappings.kind_of(wrapping) == "tp":  # which leaves one of the layers plain
        found, keys = [without_orig(each) for each in found], [without_orig(each) for each in keys]
    if found != keys:
        problems.append(f"keys: {found}")
    return problems


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_masks_lie_as_their_parameters_do_under_the_keys_of_torch(wrapping):
    size, keys = wrappings.world_size(wrapping), [pruned_by_torch(), Net()]
    keys = [set(model.state_dict()) for model in keys]
    assert {"l1.weight_orig", "l1.weight_mask", "l3.bias_orig", "l3.bias_mask"} < keys[0]
    for dtype in ("float32", "bfloat16"):
        assert run_ranks(mask_problems, size, wrapping, dtype, keys) == [[]] * size, dtype


def consolidated(wrapping: str) -> list[dict[str, torch.Tensor]]:
    """Before and after a forward; FSDP2's root stays unsharded after it."""
    model = pruned(wrapping, sizes=wrappings.runnable_sizes(wrapping))
    before = get_model_state_dict(model, options=FULL)
    with torch.no_grad():
        model(torch.ones(2, 6))
    return [before, get_model_state_dict(model, options=FULL)]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_consolidated_state_dict_loads_into_a_plain_model(wrapping):
    sizes = wrappings.runnable_sizes(wrapping)
    expected = pruned_by_torch(sizes)
    for state in run_ranks(consolidated, wrappings.world_size(wrapping), wrapping)[0]:
        model = fill(Net(sizes), "equal", "float32")
        model.load_state_dict(checkpoint.prepare_for_load(model, state), strict=True)
        for name, value in model.state_dict().items():
            wanted = expected.state_dict()[name]
            if name.endswith("_orig"):
                mask = name.removesuffix("_orig") + "_mask"
                value, wanted = (v * expected.state_dict()[mask] for v in (value, wanted))
            assert torch.equal(value, wanted), name
        x = torch.randn(3, 6)
        assert torch.equal(model(x), expected(x))


def outputs_after_loading(wrapping: str, state: dict, x: torch.Tensor) -> torch.Tensor:
    """Into a model of other values and masks, that has run already."""
    model = fill(Net(wrappings.runnable_sizes(wrapping)), "few", "float32", seed=9)
    model = wrappings.wrap(model, wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=0.1)
    model(x).sum().backward()
    set_model_state_dict(model, checkpoint.prepare_for_load(model, state), options=FULL)
    return model(x).detach()


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_state_dict_of_torch_loads_into_a_sharded_model(wrapping):
    dense = pruned_by_torch(wrappings.runnable_sizes(wrapping))
    x = torch.randn(3, 6)
    state, expected = dense.state_dict(), dense(x).detach()
    for out in run_ranks(outputs_after_loading, wrappings.world_size(wrapping), wrapping, state, x):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
