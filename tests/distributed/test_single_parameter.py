"""The functions for one parameter, on sharded parameters, against one process."""

import math
from itertools import product

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on, wrong_masks
from helpers.models import Net, fill, target
from helpers.sampling import THOROUGH, every

WRAPPINGS = wrappings.sampled([*wrappings.SHARDED, "ddp-3"])
WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
AMOUNTS = [0, 1, 0.3, 0.5, 1.0]


def start(wrapping: str, data: str = "normal", dtype: str = "float32"):
    """The wrapped model, a dense copy that is not wrapped, and the indices of this rank."""
    dense = fill(Net(), data, dtype)
    indices = wrappings.local_indices(dense, wrapping)
    return wrappings.wrap(fill(Net(), data, dtype), wrapping), dense, indices


def l1_differences(wrapping: str) -> list[str]:
    """In each round every parameter gets another amount; two rounds have them all."""
    wrong = []
    for turn in range(len(AMOUNTS) if THOROUGH else 2):
        data, dtype = [("normal", "float32"), ("few", "bfloat16")][turn % 2]
        model, dense, indices = start(wrapping, data, dtype)
        keeps = {}
        for i, name in enumerate([*WEIGHTS, "l1.bias", "l2.bias"]):
            amount = AMOUNTS[(turn + i) % len(AMOUNTS)]
            prune.l1_unstructured(*target(wrappings.unwrapped(model), name), amount=amount)
            (keeps[name],) = reference.prune([dense.get_parameter(name)], amount)
        wrong += wrong_masks(model, keeps, indices, f"{data} {dtype} round {turn}")
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.SHARDED))
def test_l1_unstructured(wrapping):
    assert_nothing_wrong_on(wrapping, l1_differences)


LN_CASES = list(product((1, 2, math.inf), (0, 1, -1), (1, 0.5)))  # n, dim, amount


def ln_differences(wrapping: str) -> list[str]:
    """In each round every weight gets another case; sums of "few" are exact, so ties are true."""
    wrong = []
    num_rounds = len(LN_CASES) // len(WEIGHTS)
    turns = [(turn, ["normal", "equal", "few"][turn % 3]) for turn in range(2 * num_rounds)]
    for turn, data in every(4, turns, WRAPPINGS.index(wrapping)):
        model, dense, indices = start(wrapping, data)
        for i, name in enumerate(WEIGHTS):
            n, dim, amount = LN_CASES[turn // 2 + i * num_rounds]
            module, _ = target(wrappings.unwrapped(model), name)
            prune.ln_structured(module, "weight", amount, n, dim)
            keep = reference.prune_channels(dense.get_parameter(name), amount, n, dim)
            when = f"{data} n={n} dim={dim} amount={amount}"
            wrong += wrong_masks(model, {name: keep}, indices, when)
    return wrong


@pytest.mark.parametrize("wrapping", wrappings.sampled(wrappings.SHARDED))
def test_ln_structured(wrapping):
    assert_nothing_wrong_on(wrapping, ln_differences)


def other_norm_differences(wrapping: str) -> list[str]:
    """The count of elements, which torch has as order 0; and refusals."""
    model, dense, indices = start(wrapping)
    layer = wrappings.unwrapped(model).l2
    refused = {"fro": NotImplementedError, "nuc": NotImplementedError}
    wrong = []
    for n, kind in refused.items():
        try:
            prune.ln_structured(layer, "weight", 0.5, n, 0)
            wrong.append(f"n={n} was not refused")
        except kind as error:
            wrong += [] if f"n={n!r}" in str(error) else [str(error)]
    torch_prune.ln_structured(dense.l1, "weight", 0.5, 0, 0)
    prune.ln_structured(wrappings.unwrapped(model).l1, "weight", 0.5, 0, 0)
    return wrong + wrong_masks(model, {"l1.weight": dense.l1.weight_mask}, indices, "n=0")


@pytest.mark.parametrize("wrapping", ["fsdp2-3", "tp-2", "fsdp2_tp-2x2"])
def test_other_norms(wrapping):
    assert_nothing_wrong_on(wrapping, other_norm_differences)


def random_structured_problems(wrapping: str) -> list[str]:
    """Whole channels, as many as asked for, the same channels on every rank and in torch."""
    wrong = []
    for name, amount, dim in [("l1.weight", 0.5, 0), ("l2.weight", 3, 1), ("l3.weight", 1, -1)]:
        model, dense, indices = start(wrapping)
        torch.manual_seed(5)
        prune.random_structured(*target(wrappings.unwrapped(model), name), amount, dim)
        torch.manual_seed(5)
        torch_prune.random_structured(*target(dense, name), amount, dim)
        keep = target(dense, name)[0].weight_mask
        wrong += wrong_masks(model, {name: keep}, indices, f"amount={amount} dim={dim}")
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_random_structured_draws_the_channels_of_one_process(wrapping):
    assert_nothing_wrong_on(wrapping, random_structured_problems)


def custom_mask_differences(wrapping: str, as_dtensor: bool) -> list[str]:
    model, dense, indices = start(wrapping)
    generator = torch.Generator().manual_seed(3)
    keeps = {
        name: torch.rand(dense.get_parameter(name).shape, generator=generator) < 0.5
        for name in WEIGHTS
    }
    for name, keep in keeps.items():
        module, _ = target(wrappings.unwrapped(model), name)
        given = keep.clone()
        if as_dtensor and isinstance(module.weight, DTensor):
            part = wrappings.my_part(keep, indices[name])
            given = DTensor.from_local(
                part,
                module.weight.device_mesh,
                module.weight.placements,
                shape=module.weight.shape,
                stride=module.weight.stride(),
            )
        prune.custom_from_mask(module, "weight", given)
    return wrong_masks(model, keeps, indices, "sharded mask" if as_dtensor else "whole mask")


@pytest.mark.parametrize("as_dtensor", [False, True])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_custom_from_mask(wrapping, as_dtensor):
    assert_nothing_wrong_on(wrapping, custom_mask_differences, as_dtensor)


def sequence_differences(wrapping: str) -> list[str]:
    """The same calls on the sharded model and, by torch, on a dense copy."""
    model, dense, indices = start(wrapping)
    wrong = []
    generator = torch.Generator().manual_seed(4)
    custom = torch.rand(dense.l2.weight.shape, generator=generator) < 0.8
    calls = [
        ("l1_unstructured", "l1.weight", {"amount": 0.2}),
        ("ln_structured", "l1.weight", {"amount": 0.3, "n": 2, "dim": 0}),
        ("ln_structured", "l1.weight", {"amount": 2, "n": 1, "dim": 1}),
        ("l1_unstructured", "l1.weight", {"amount": 0.5}),
        ("identity", "l2.weight", {}),
        ("custom_from_mask", "l2.weight", {"mask": custom}),
        ("l1_unstructured", "l2.weight", {"amount": 7}),
        ("ln_structured", "l2.weight", {"amount": 0.5, "n": math.inf, "dim": -1}),
        ("l1_unstructured", "l3.weight", {"amount": 1.0}),
        ("l1_unstructured", "l3.weight", {"amount": 0.5}),
    ]
    for step, (function, name, arguments) in enumerate(calls):
        getattr(prune, function)(*target(wrappings.unwrapped(model), name), **arguments)
        getattr(torch_prune, function)(*target(dense, name), **arguments)
        keep = target(dense, name)[0].weight_mask
        wrong += wrong_masks(model, {name: keep}, indices, f"after call {step} ({function})")
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_sequences_of_methods_equal_torch(wrapping):
    assert_nothing_wrong_on(wrapping, sequence_differences)


def life_cycle_problems(wrapping: str) -> list[str]:
    """identity, prune, remove: is_pruned, names, values and the Parameter object."""
    model, dense, indices = start(wrapping)
    module = wrappings.unwrapped(model).l1
    names, parameter = list(module._parameters), module.weight
    seen = {"pruned at first": prune.is_pruned(model)}
    prune.identity(module, "weight")
    seen["identity prunes"] = bool((wrappings.local(module.weight_mask) != 1).any())
    seen["not pruned after identity"] = not prune.is_pruned(model)
    prune.l1_unstructured(module, "weight", 0.5)
    (keep,) = reference.prune([dense.l1.weight], 0.5)
    part = wrappings.my_part(keep, indices["l1.weight"])
    effective = wrappings.my_part(dense.l1.weight.detach() * keep, indices["l1.weight"])
    seen["weight is not orig * mask"] = not torch.equal(wrappings.local(module.weight), effective)
    stored = wrappings.stored(module, "weight")
    seen["another Parameter object"] = stored is not parameter
    if wrappings.kind_of(wrapping) in ("plain", "ddp"):
        seen["values lost"] = not torch.equal(stored, dense.l1.weight)
    prune.remove(module, "weight")
    seen["pruned at last"] = prune.is_pruned(model)
    seen["names differ"] = set(module._parameters) != set(names) or bool(module._buffers)
    seen["order of parameters differs"] = list(module._parameters) != names
    seen["another Parameter object at last"] = module.weight is not parameter
    seen["wrong values at last"] = not torch.equal(wrappings.local(module.weight), effective)
    seen["pruned values at last"] = bool((wrappings.local(module.weight)[~part] != 0).any())
    try:
        prune.remove(module, "weight")
        seen["removed twice"] = True
    except ValueError:
        pass
    return [problem for problem, happened in seen.items() if happened]


@pytest.mark.parametrize("wrapping", [w for w in WRAPPINGS if w not in wrappings.FSDP1_FLAT])
def test_identity_prune_remove(wrapping):
    problems = run_ranks(life_cycle_problems, wrappings.world_size(wrapping), wrapping)
    if wrappings.kind_of(wrapping) in ("ddp", "tp"):  # the compatible path: torch moves the name
        problems = [[p for p in wrong if "order of" not in p] for wrong in problems]
    assert_nothing_wrong(problems)


def amount_errors(wrapping: str) -> list[tuple[str, bool]]:
    """What wrong arguments raise, and whether the module was left alone."""
    model, _, _ = start(wrapping)
    module = wrappings.unwrapped(model).l1
    results = []
    for call in [
        lambda: prune.l1_unstructured(module, "weight", amount=61),  # 60 elements
        lambda: prune.l1_unstructured(module, "weight", amount=-1),
        lambda: prune.l1_unstructured(module, "weight", amount=1.5),
        lambda: prune.l1_unstructured(module, "weight", amount="half"),
        lambda: prune.l1_unstructured(module, "nothing", amount=1),
        lambda: prune.ln_structured(module, "weight", 0.5, n=2, dim=5),
        lambda: prune.ln_structured(module, "weight", 11, n=2, dim=0),  # 10 channels
        lambda: prune.ln_structured(module, "bias", 0.5, n=2, dim=0),  # one dimension
        lambda: prune.random_structured(module, "bias", 0.5, dim=0),
    ]:
        try:
            call()
            results.append(("nothing", False))
        except Exception as error:
            untouched = list(module._parameters) == ["weight", "bias"] and not module._buffers
            results.append((type(error).__name__, untouched))
    return results


@pytest.mark.parametrize("wrapping", ["fsdp2-2", "tp-2", "hsdp-2x2", "fsdp2_tp-2x2"])
def test_wrong_arguments_raise_what_torch_raises_and_change_nothing(wrapping):
    names = [*["ValueError"] * 3, "TypeError", "AttributeError", "IndexError", *["ValueError"] * 3]
    expected = [(name, True) for name in names]
    per_rank = run_ranks(amount_errors, wrappings.world_size(wrapping), wrapping)
    assert per_rank == [expected] * wrappings.world_size(wrapping)
