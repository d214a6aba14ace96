"""Methods, callbacks and calls written for torch.nn.utils.prune, and calls that work only here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from equal_modules import (
    assert_same_modules,
    distinct,
    fill_distinct,
    linear,
    on_both,
    pruned_twice,
    twin,
)
from torch import Tensor, nn

import distprune
import distprune as prune
from helpers.comparisons import snapshot


def threshold_method(library: Any) -> type:
    """A method as users write them for torch."""

    class Threshold(library.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def __init__(self, threshold):
            self.threshold = threshold

        def compute_mask(self, t, default_mask):
            return default_mask * (t.abs() > self.threshold)

        @classmethod
        def apply(cls, module, name, threshold, importance_scores=None):
            return super().apply(module, name, threshold, importance_scores=importance_scores)

    return Threshold


def first_rows_method(library: Any, pruning_type: str | None, has_dim: bool) -> type:
    class FirstRows(library.BasePruningMethod):
        def compute_mask(self, t, default_mask):
            mask = default_mask.clone()
            mask[:1] = 0
            return mask

    if pruning_type is not None:
        FirstRows.PRUNING_TYPE = pruning_type
    if has_dim:
        FirstRows.dim = 0
    return FirstRows


def test_methods_written_for_torch():
    theirs = fill_distinct(nn.Linear(6, 5), torch.float32, seed=0)
    ours = twin(theirs)
    for threshold in (0.1, 0.2, 0.3):
        for library, module in ((torch_prune, theirs), (distprune, ours)):
            threshold_method(library).apply(module, "weight", threshold)
            module(torch.ones(1, 6))
        assert_same_modules(ours, theirs)
    for library, module in ((torch_prune, theirs), (distprune, ours)):
        scores_ = distinct([5, 6], torch.float32, seed=4)
        threshold_method(library).apply(module, "weight", 0.2, importance_scores=scores_)
    assert_same_modules(ours, theirs)
    assert 0 < int(ours.weight_mask.sum()) < 30


@pytest.mark.parametrize("has_dim", [False, True])
@pytest.mark.parametrize("pruning_type", [None, "unstructured", "structured", "global", "other"])
@pytest.mark.parametrize("is_pruned", [False, True])
def test_pruning_types_of_methods_written_for_torch(pruning_type, has_dim, is_pruned):
    theirs = fill_distinct(nn.Linear(6, 5), torch.float32, seed=0)
    ours = twin(theirs)
    for library, module in ((torch_prune, theirs), (distprune, ours)):
        if is_pruned:
            library.ln_structured(module, "weight", 1, 2, 0)
    before = snapshot(ours)

    def apply(library, module):
        first_rows_method(library, pruning_type, has_dim).apply(module, "weight")

    raised = on_both(lambda: apply(distprune, ours), lambda: apply(torch_prune, theirs), 0)
    if raised is not None:
        assert snapshot(ours) == before
    else:
        assert_same_modules(ours, theirs)


def channels_last() -> nn.Module:
    return fill_distinct(nn.Conv2d(3, 4, 2), torch.float32, 0).to(memory_format=torch.channels_last)


def transposed() -> nn.Module:
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(distinct([4, 3], torch.float32, seed=0).t())
    return module


def by(function: str) -> Callable[[Any, nn.Module], Any]:
    return lambda library, module: getattr(library, function)(module, "weight", 3)


RANDOM = by("random_unstructured")


def globally(
    library: Any,
    module: nn.Module,
    scores: Tensor | None = None,
    pairs: Any = None,
    method: str = "L1Unstructured",
) -> object:
    pairs = pairs or [(module, "weight")]
    scores = None if scores is None else {(module, "weight"): scores}
    return library.global_unstructured(pairs, getattr(library, method), scores, amount=3)


def globally_from_a_generator(library: Any, module: nn.Module) -> None:
    globally(library, module, pairs=((module, name) for name in ["weight"]))


def by_a_container_of_two(library: Any, module: nn.Module) -> None:
    methods = [library.Identity(), library.L1Unstructured(3)]
    for method in methods:
        method._tensor_name = "weight"
    mask = library.PruningContainer(*methods).compute_mask(module.weight, torch.ones(3, 4))
    library.custom_from_mask(module, "weight", mask)


@pytest.mark.parametrize(
    ("make", "call", "error"),
    [
        # Torch views scores as flat, which memory in another order does not allow.
        *(
            (make, call, RuntimeError)
            for make in (channels_last, transposed)
            for call in (
                by("l1_unstructured"),
                RANDOM,
                globally,
                partial(globally, method="RandomUnstructured"),
            )
        ),
        # It reads the list three times.
        (partial(nn.Linear, 4, 3), globally_from_a_generator, ValueError),
        # It compares names with that of a container that has none yet.
        (partial(nn.Linear, 4, 3), by_a_container_of_two, AttributeError),
    ],
)
def test_calls_that_work_only_here(make, call, error):
    with pytest.raises(error):
        call(torch_prune, make())
    for is_tied in (False, True):
        module = make()
        if is_tied:
            nn.init.ones_(module.weight)
        plain = copy.deepcopy(module)
        plain.weight = nn.Parameter(module.weight.detach().contiguous())
        for each in (module, plain):
            torch.manual_seed(0)
            call(distprune, each)
            assert int((each.weight_mask == 0).sum()) == int((each.weight == 0).sum()) == 3
        # Torch's own random numbers are drawn in the order of memory.
        assert torch.equal(module.weight_mask, plain.weight_mask) or call is RANDOM


def test_hooks_can_be_removed_by_hand():
    """As Lightning's callback does, which makes pruning permanent with the hooks themselves."""
    theirs = fill_distinct(nn.Linear(6, 5), torch.float32, seed=0)
    ours = twin(theirs)
    for library, module in ((torch_prune, theirs), (distprune, ours)):
        library.l1_unstructured(module, "weight", 0.5)
        library.l1_unstructured(module, "weight", 0.5)
        library.random_unstructured(module, "bias", 2)
        for key, hook in list(module._forward_pre_hooks.items()):
            hook.remove(module)
            del module._forward_pre_hooks[key]
    assert not ours._forward_pre_hooks
    assert torch.equal(ours.weight, theirs.weight)
    assert int((ours.bias == 0).sum()) == 2


# What docs/differences.md says, and modules that torch has pruned already.


def test_a_global_call_returns_a_report():
    report = globally(prune, linear())
    assert isinstance(report, prune.PruningReport) and "3" in str(report)
    assert globally(torch_prune, linear()) is None


def test_a_loaded_state_dict_acts_at_once():
    """torch computes the masked weight at the next forward."""
    for library, is_fresh in ((prune, True), (torch_prune, False)):
        module = library.l1_unstructured(linear(), "weight", 0.5)
        other = library.l1_unstructured(linear(seed=1), "weight", 0.5)
        expected = other.weight_orig * other.weight_mask
        assert not torch.equal(module.weight, expected)
        module.load_state_dict(other.state_dict())
        assert torch.equal(module.weight, expected) == is_fresh
        module(torch.ones(1, 6))
        assert torch.equal(module.weight, expected)


LOCAL = {
    "identity": lambda library, module: library.identity(module, "weight"),
    "l1": lambda library, module: library.l1_unstructured(module, "weight", 3),
    "random": lambda library, module: library.random_structured(module, "weight", 1, 0),
    "custom": lambda library, module: library.custom_from_mask(
        module, "weight", torch.ones_like(module.weight)
    ),
    "global": globally,
}


@pytest.mark.parametrize("call", LOCAL.values(), ids=LOCAL)
def test_parameters_on_the_meta_device_are_refused(call: Callable[..., object]):
    module = nn.Linear(6, 5, device="meta")
    with pytest.raises(NotImplementedError, match="meta device"):
        call(prune, module)
    assert not prune.is_pruned(module)
    if call is not globally:  # torch cannot count there
        call(torch_prune, module)
        assert module.weight_mask.is_meta


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("of_parameter", [True, False])
def test_complex_scores_are_refused_in_a_global_pruning(of_parameter):
    """Their absolute values are ranked as by torch."""
    parameter = torch.randn(5, 6, dtype=torch.complex64)

    def made() -> nn.Module:
        module = linear()
        if of_parameter:
            module.weight = nn.Parameter(parameter)
        return module

    ours, theirs = made(), made()
    scores = None if of_parameter else parameter
    with pytest.raises(NotImplementedError, match=r"importance_scores=\|w\|"):
        globally(prune, ours, scores)
    assert not prune.is_pruned(ours)
    globally(prune, ours, parameter.abs())
    globally(torch_prune, theirs, scores)
    assert torch.equal(ours.weight_mask != 0, theirs.weight_mask != 0)


def test_no_private_helper_is_missing():
    private = [n for n in vars(torch_prune) if n.startswith(("_compute", "_validate"))]
    assert len(private) == 6 and all(hasattr(prune, name) for name in private)


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def damping(library):
    class Damped(library.L1Unstructured):
        def apply_mask(self, module: nn.Module) -> torch.Tensor:
            mask = getattr(module, self._tensor_name + "_mask")
            return getattr(module, self._tensor_name + "_orig") * (mask + 0.1 * (1 - mask))

    return Damped


@pytest.mark.parametrize("in_container", [False, True])
def test_remove_keeps_what_a_method_makes_of_its_mask(in_container):
    """A container multiplies, as in torch."""
    mine, of_torch = linear(), linear()
    for library, module in ((prune, mine), (torch_prune, of_torch)):
        damping(library).apply(module, "weight", 0.3)
        if in_container:
            library.l1_unstructured(module, "weight", 0.3)
    output = mine(X)
    assert torch.equal(output, of_torch(X))
    prune.remove(mine, "weight")
    torch_prune.remove(of_torch, "weight")
    assert torch.equal(mine(X), output) or in_container
    assert torch.equal(mine.weight, of_torch.weight)


@pytest.mark.parametrize("call", LOCAL.values(), ids=LOCAL)
def test_a_parameter_that_torch_has_pruned_is_refused(call):
    module = torch_prune.l1_unstructured(linear(), "weight", 0.3)
    output, state = module(X), {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"Linear\.weight was pruned by torch\.nn\.utils\.prune"):
        call(prune, module)
    assert list(module.state_dict()) == list(state)
    assert all(torch.equal(module.state_dict()[key], state[key]) for key in state)
    assert torch.equal(module(X), output)
    prune.l1_unstructured(module, "bias", 0.5)  # another parameter of the same module


def test_the_way_out_takes_the_mask_over():
    module = torch_prune.l1_unstructured(linear(), "weight", 0.3)
    output = module(X)
    mask = module.weight_mask
    torch_prune.remove(module, "weight")
    prune.custom_from_mask(module, "weight", mask)
    assert torch.equal(module(X), output)
    prune.l1_unstructured(module, "weight", 4)
    assert int((module.weight == 0).sum()) == round(0.3 * 30) + 4
    prune.remove(module, "weight")
    module(X)


# Calls that are refused and change nothing, where torch.nn.utils.prune fails or surprises.


class TestRefusals:
    @pytest.mark.parametrize("is_pruned", [False, True])
    @pytest.mark.parametrize(
        ("amount", "error"),
        [(math.nan, ValueError), (31, ValueError), (True, TypeError), (False, TypeError)],
    )
    def test_amounts(self, amount, error, is_pruned):
        module = linear()
        if is_pruned:
            prune.l1_unstructured(module, "weight", 0)
        before = snapshot(module)
        pairs = [(module, "weight")]
        for call in (
            lambda: prune.l1_unstructured(module, "weight", amount),
            lambda: prune.random_unstructured(module, "weight", amount),
            lambda: prune.ln_structured(module, "weight", amount, 2, 0),
            lambda: prune.random_structured(module, "weight", amount, 0),
            lambda: prune.global_unstructured(pairs, prune.L1Unstructured, amount=amount),
        ):
            with pytest.raises(error, match=r"amount"):
                call()
            assert snapshot(module) == before

    def test_keywords_of_a_method_of_ones_own(self):
        class Threshold(prune.BasePruningMethod):
            PRUNING_TYPE = "unstructured"

            def __init__(self, limit, *, factor=1.0, **others):
                self.limit, self.others = limit * factor, others

            def compute_mask(self, t, default_mask):
                return default_mask * (t.abs() >= self.limit)

        module = linear()
        report = prune.global_unstructured(
            [(module, "weight")], Threshold, limit=0.05, factor=2.0, anything=1, amount=3
        )
        kept = module.weight_orig.abs() >= 0.1
        assert torch.equal(module.weight_mask, kept.float())
        assert report.amount == 3

    @pytest.mark.parametrize("method", ["l1_unstructured", "random_unstructured", "identity"])
    def test_a_parameter_that_is_none(self, method):
        module = linear(bias=False)
        before = snapshot(module)
        arguments = () if method == "identity" else (0.5,)
        with pytest.raises(TypeError, match="bias"):
            getattr(prune, method)(module, "bias", *arguments)
        assert snapshot(module) == before
        with pytest.raises(TypeError, match="bias"):
            prune.global_unstructured([(module, "bias")], prune.L1Unstructured, amount=0.5)
        assert snapshot(module) == before

    def test_a_second_pruning_whose_mask_fails(self, monkeypatch):
        module, x = pruned_twice()
        module(x).sum().backward()
        before = snapshot(module)

        def fail(self, t, default_mask):
            raise RuntimeError("no mask")

        class Fails(prune.L1Unstructured):
            compute_mask = fail

        monkeypatch.setattr(prune.LnStructured, "compute_mask", fail)
        pairs = [(module, "bias"), (module, "weight")]
        for call in (
            lambda: prune.ln_structured(module, "weight", 0.5, 2, 0),
            lambda: Fails.apply(module, "weight", 0.5),
            lambda: prune.global_unstructured(pairs, Fails, amount=0.5),
        ):
            with pytest.raises(RuntimeError, match="no mask"):
                call()
            assert snapshot(module) == before
        monkeypatch.undo()
        assert prune.is_pruned(module)
        prune.l1_unstructured(module, "weight", 2)
        prune.remove(module, "weight")

    def test_a_bad_parameter_late_in_a_global_list(self):
        model = nn.Sequential(linear(), linear(1))
        for _ in range(2):  # its container must not grow either
            prune.l1_unstructured(model[0], "weight", 2)
        model[1].weight_mask = "taken"
        before = snapshot(model)
        with pytest.raises(KeyError, match="weight_mask"):
            prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.5)
        assert snapshot(model) == before

    def test_the_default_mask_is_not_written_to(self):
        method = prune.L1Unstructured(3)
        method._tensor_name = "weight"
        default_mask = torch.ones(4, 5)
        mask = prune.PruningContainer(method).compute_mask(torch.randn(4, 5), default_mask)
        assert int(default_mask.sum()) == 20
        assert int(mask.sum()) == 17
