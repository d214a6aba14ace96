"""What docs/differences.md says, and modules that torch has pruned already."""

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


def test_remove_keeps_what_a_method_makes_of_its_mask():
    mine, of_torch = linear(), linear()
    damping(prune).apply(mine, "weight", 0.5)
    damping(torch_prune).apply(of_torch, "weight", 0.5)
    output = mine(X)
    assert torch.equal(output, of_torch(X))
    prune.remove(mine, "weight")
    torch_prune.remove(of_torch, "weight")
    assert torch.equal(mine(X), output)
    assert torch.equal(mine.weight, of_torch.weight)


def test_remove_of_a_container_multiplies_as_in_torch():
    mine, of_torch = linear(), linear()
    for library, module in ((prune, mine), (torch_prune, of_torch)):
        damping(library).apply(module, "weight", 0.3)
        library.l1_unstructured(module, "weight", 0.3)
    assert torch.equal(mine(X), of_torch(X))
    prune.remove(mine, "weight")
    torch_prune.remove(of_torch, "weight")
    assert torch.equal(mine.weight, of_torch.weight)


CALLS = {
    "single": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "global": lambda module: prune.global_unstructured(
        [(module, "weight")], prune.L1Unstructured, amount=0.5
    ),
    "identity": lambda module: prune.identity(module, "weight"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_parameter_that_torch_has_pruned_is_refused(call):
    module = torch_prune.l1_unstructured(linear(), "weight", 0.3)
    output, state = module(X), {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"Linear\.weight was pruned by torch\.nn\.utils\.prune"):
        CALLS[call](module)
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
