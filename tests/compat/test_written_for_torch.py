"""Methods, callbacks and calls written for torch.nn.utils.prune, and calls that work only here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from equal_modules import assert_same_modules, distinct, fill_distinct, on_both, snapshot, twin
from torch import nn

import distprune


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
    library: Any, module: nn.Module, pairs: Any = None, method: str = "L1Unstructured"
) -> None:
    pairs = pairs or [(module, "weight")]
    library.global_unstructured(pairs, getattr(library, method), amount=3)


def globally_from_a_generator(library: Any, module: nn.Module) -> None:
    globally(library, module, ((module, name) for name in ["weight"]))


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


def removed_as_callbacks_do(library: Any, module: nn.Module) -> nn.Module:
    """Lightning's callback makes pruning permanent with the hooks themselves."""
    for key in list(module._forward_pre_hooks):
        hook = module._forward_pre_hooks[key]
        if isinstance(hook, library.BasePruningMethod):
            hook.remove(module)
            del module._forward_pre_hooks[key]
    return module


def test_hooks_can_be_removed_by_hand():
    theirs = fill_distinct(nn.Linear(6, 5), torch.float32, seed=0)
    ours = twin(theirs)
    for library, module in ((torch_prune, theirs), (distprune, ours)):
        library.l1_unstructured(module, "weight", 0.5)
        library.l1_unstructured(module, "weight", 0.5)
        library.random_unstructured(module, "bias", 2)
        removed_as_callbacks_do(library, module)
    assert not ours._forward_pre_hooks
    assert torch.equal(ours.weight, theirs.weight)
    assert int((ours.bias == 0).sum()) == 2
