"""What docs/differences.md says, where no other test compares the two libraries in it.

How ``remove`` acts on wrappers is tested in distributed/test_pruned_before_backward.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from pruned_models import linear
from torch import Tensor, nn

import distprune as prune


def globally(library, module: nn.Module, scores: Tensor | None = None) -> object:
    importance_scores = None if scores is None else {(module, "weight"): scores}
    method = library.L1Unstructured
    return library.global_unstructured([(module, "weight")], method, importance_scores, amount=3)


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
}


@pytest.mark.parametrize("call", LOCAL.values(), ids=LOCAL)
def test_parameters_on_the_meta_device_are_refused(call: Callable[..., object]):
    module = nn.Linear(6, 5, device="meta")
    with pytest.raises(NotImplementedError, match="meta device"):
        call(prune, module)
    assert not prune.is_pruned(module)
    call(torch_prune, module)
    assert module.weight_mask.is_meta


def test_parameters_on_the_meta_device_are_refused_in_a_global_pruning():
    with pytest.raises(NotImplementedError, match="meta device"):
        globally(prune, nn.Linear(6, 5, device="meta"))


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
