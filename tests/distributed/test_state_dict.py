"""What a mask is on each wrapper; state dicts of every kind: keys, what loads, what is refused."""

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune import checkpoint
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, raised
from helpers.models import EVEN_HIDDEN, UNEVEN, Net, fill, seeded, target

NAMES = ["l1.weight", "l2.weight", "l3.bias"]
WRAPPINGS = wrappings.sampled(wrappings.ALL)
FULL = StateDictOptions(full_state_dict=True)


def pruned(
    wrapping: str, dtype="float32", sizes=UNEVEN, data="normal", amount=0.5, seed=0
) -> torch.nn.Module:
    model = wrappings.wrap(fill(Net(sizes), data, dtype, seed), wrapping)
    targets = [target(wrappings.unwrapped(model), name) for name in NAMES]
    prune.global_unstructured(targets, prune.L1Unstructured, amount=amount)
    return model


def pruned_by_torch(sizes=UNEVEN) -> torch.nn.Module:
    """A dense model with torch's own hooks and the masks of the reference."""
    model = seeded(Net(sizes))
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


class Tied(Net):
    """The last layer shares its weight with the second one."""

    def __init__(self):
        super().__init__((6, 12, 12, 12))
        self.l3.weight = self.l2.weight


def outputs_after_loading(wrapping: str, how: str, state: dict, x: torch.Tensor) -> torch.Tensor:
    """Into a fresh model, a tied one, or one of other values and masks that has run already."""
    sizes = wrappings.runnable_sizes(wrapping)
    if how == "pruned":
        model = pruned(wrapping, sizes=sizes, data="few", amount=0.1, seed=9)
        model(x).sum().backward()
    else:
        model = wrappings.wrap(Tied() if how == "tied" else Net(sizes), wrapping)
    inner = wrappings.unwrapped(model)
    names = {name.removesuffix("_mask") for name in state if name.endswith("_mask")}
    set_model_state_dict(model, checkpoint.prepare_for_load(model, state), options=FULL)
    out = model(x).detach()
    folded = checkpoint.fold(inner.state_dict())
    for module, parameter in (target(inner, name) for name in names):
        if prune.is_pruned(module):  # else it went with the one that it is tied to
            prune.remove(module, parameter)
    if wrappings.kept_by_name(inner.l1):
        left = {n: wrappings.local(value) for n, value in inner.state_dict().items()}
        for name in names:
            assert torch.equal(wrappings.local(folded[name]), left[name]), f"fold of {name}"
    return out


@pytest.mark.parametrize(
    ("wrapping", "how"),
    [
        *((wrapping, "pruned") for wrapping in WRAPPINGS),
        *((wrapping, "fresh") for wrapping in ("plain-1", "ddp-2", "fsdp2-3", "tp-2")),
        # torch itself unties them or refuses under the others
        *((wrapping, "tied") for wrapping in ("plain-1", "ddp-2", "fsdp2_root-2")),
    ],
)
def test_a_state_dict_of_torch_loads(wrapping, how):
    sizes = wrappings.runnable_sizes(wrapping)
    dense = Tied() if how == "tied" else pruned_by_torch(sizes)
    for layer in (dense.l2, dense.l3) if how == "tied" else ():
        torch_prune.l1_unstructured(layer, "weight", 0.5)
    x = torch.randn(3, 6)
    state, expected = dense.state_dict(), dense(x).detach()
    size = wrappings.world_size(wrapping)
    for out in run_ranks(outputs_after_loading, size, wrapping, how, state, x):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_a_dense_checkpoint_into_a_pruned_model_needs_leave(tmp_path):
    """That masks stay then, on every wrapping, is a row of test_operations.py."""
    model = seeded(Net())
    dcp.save(checkpoint.get_state_dict(model), checkpoint_id=tmp_path / "dense")
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
    with pytest.raises(ValueError, match=r"l2.weight, l3.weight: pruned(.|\n)*unmasked='keep'"):
        checkpoint.load(str(tmp_path / "dense"), model)
    with pytest.raises(ValueError, match="unmasked='sometimes'"):
        checkpoint.load(str(tmp_path / "dense"), model, unmasked="sometimes")


def names_when_wrapped(how: str) -> set[str]:
    torch._dynamo.reset()
    model: nn.Module = seeded(Net(EVEN_HIDDEN))
    if "ac" in how:
        model.l2 = checkpoint_wrapper(model.l2)
    if "ddp" in how:
        model = nn.parallel.DistributedDataParallel(model)
    if "compile" in how:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = checkpoint.get_state_dict(model, optimizer)
    return {*state["model"], *(f"{name} state" for name in state["optimizer"]["state"])}


def names_of_all() -> list[set[str]]:
    wrapped = ["plain", "ac", "ddp", "compile", "ddp and ac", "ddp, compile and ac"]
    return [names_when_wrapped(how) for how in wrapped]


def test_keys_have_no_wrapper_prefixes():
    for plain, *others in run_ranks(names_of_all, 2):
        assert {"l2.weight_mask", "l2.weight_orig", "l2.weight_orig state"} < plain
        for names in others:
            assert names == plain


def uneven_strided(path: str) -> tuple[list[str], bool]:
    """7 rows on a 3x2 mesh: DCP takes the shards of the last ranks for others."""
    model = wrappings.wrap(seeded(Net((6, 7, 7, 3))), "fsdp2_tp-3x2")
    before = {name: wrappings.local(value).clone() for name, value in model.state_dict().items()}
    dcp.save(model.state_dict(), checkpoint_id=path)
    loaded = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(loaded, checkpoint_id=path)
    equal = all(torch.equal(wrappings.local(value), before[name]) for name, value in loaded.items())
    prune.l1_unstructured(model.l2, "weight", 0.5)
    messages, load = [], partial(checkpoint.load, path, unmasked="keep")
    for call in (checkpoint.get_state_dict, checkpoint.check_writable, lambda m: load(model=m)):
        messages.append(raised(partial(call, model)))
    return messages, equal


def test_what_torch_misplaces_is_refused(tmp_path):
    per_rank = run_ranks(uneven_strided, 6, str(tmp_path / "checkpoint"))
    assert not all(equal for _, equal in per_rank), "torch saves it now: take the refusal out"
    for messages, _ in per_rank:
        for message in messages:
            assert message.startswith("NotImplementedError: ")
            assert "l1.weight (shape (7, 6)" in message
            assert "l2" not in message and "l3" not in message


def test_fold():
    values = torch.tensor([1.0, -2.0, -0.0, torch.inf, torch.nan, 3.0])
    keep = torch.tensor([1, 1, 0, 0, 0, 0])
    state = {
        "a.b_orig": values,
        "causal_mask": keep,
        "c": values,
        "a.b_mask": keep.bool(),
        "lonely_orig": values,
    }
    before = dict(state)
    folded = checkpoint.fold(state)
    assert list(folded) == ["a.b", "causal_mask", "c", "lonely_orig"]
    assert folded["a.b"].numpy().tobytes() == torch.tensor([1.0, -2, 0, 0, 0, 0]).numpy().tobytes()
    assert all(folded[name] is state[name] for name in ("causal_mask", "c", "lonely_orig"))
    assert all(state[name] is before[name] for name in before) and len(state) == len(before)


def local_state(model: torch.nn.Module) -> dict:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict()


def load_local(model: torch.nn.Module, state: dict) -> None:
    # With use_orig_params=True torch writes "_flat_param", too, and does not know it again.
    is_flat = any(isinstance(p, FlatParameter) for p in model.parameters())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        keys = model.load_state_dict(state, strict=is_flat)
    assert not keys.missing_keys and all("_flat_param" in key for key in keys.unexpected_keys), keys


def problems_of_local_states(wrapping: str) -> list[str]:
    """Into a model of other weights and masks, that has run already."""
    x, wrong = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)), []
    sizes = wrappings.runnable_sizes(wrapping)
    model = pruned(wrapping, sizes=sizes)
    other = pruned(wrapping, sizes=sizes, data="few", amount=0.1, seed=9)
    with torch.no_grad():
        expected = model(x)
        if torch.equal(other(x), expected):
            wrong.append("both models are the same")
    load_local(other, local_state(model))
    inner = [wrappings.unwrapped(each) for each in (model, other)]
    masks = [prune.get_masks([target(each, name) for name in NAMES]) for each in inner]
    if not all(map(torch.equal, *masks)):
        wrong.append("other masks")
    with torch.no_grad():
        if not torch.equal(other(x), expected):
            wrong.append("other outputs")
    # A mask of another length is told by its name, and by the length that it should have.
    state = local_state(model)
    key = next(key for key in state if key.endswith("l1.weight_mask"))
    state[key] = torch.ones(len(state[key]) + 1, dtype=torch.bool)
    text, length = raised(lambda: load_local(other, state)), len(state[key]) - 1
    is_told = f"expected this rank's {length} elements of the mask" in text
    return wrong + [text] * (not is_told or not text.startswith("RuntimeError: "))


@pytest.mark.parametrize("wrapping", ["fsdp1-2", "fsdp1-3", "fsdp1_root-3", "fsdp1_flat-2"])
def test_local_state_dicts_of_fsdp1_load_into_a_model_of_other_masks(wrapping):
    assert_nothing_wrong_on(wrapping, problems_of_local_states)
