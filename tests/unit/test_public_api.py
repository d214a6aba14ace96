"""The public surface: a change to it is always deliberate."""

import inspect
import sys

import pytest
import torch.nn.utils.prune as torch_prune

import distprune
from helpers.forked_scripts import output_of

TORCH = {
    "BasePruningMethod", "CustomFromMask", "Identity", "L1Unstructured", "LnStructured",
    "PruningContainer", "RandomStructured", "RandomUnstructured", "custom_from_mask",
    "global_unstructured", "identity", "is_pruned", "l1_unstructured", "ln_structured",
    "random_structured", "random_unstructured", "remove",
}  # fmt: skip
OURS = {
    "ChannelGroupReport", "ChannelPart", "FactoredScores", "GlobalMask",
    "LowestScore", "MaskLoadingReport", "NamedParameter",
    "ParameterReport", "PruningReport", "ReconstructedParameter", "ReconstructionReport",
    "StructuredReport", "VerificationError", "VerificationReport", "VerifiedParameter",
    "budgets", "checkpoint", "criteria",
    "dense_gradients", "dynamic", "get_masks", "global_mask", "global_structured",
    "hold_zeros", "keep_pruned_values", "load_masks", "masks_aside", "masks_from_zeros",
    "reconstruct", "save_masks", "schedule", "select", "set_masks",
    "shrink_channels", "statistics", "verify",
}  # fmt: skip


def test_public_names():
    assert distprune.__all__ == sorted(distprune.__all__)
    assert set(distprune.__all__) == TORCH | OURS


def parameters_of(function):
    return [
        (p.name, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is not p.KEYWORD_ONLY
    ]


@pytest.mark.parametrize("name", sorted(TORCH))
def test_signatures_are_those_of_torch(name):
    ours, theirs = getattr(distprune, name), getattr(torch_prune, name)
    if not inspect.isclass(theirs):
        assert parameters_of(ours) == parameters_of(theirs)
        return
    assert getattr(ours, "PRUNING_TYPE", None) == getattr(theirs, "PRUNING_TYPE", None)
    for method in ("__init__", "apply", "compute_mask", "apply_mask", "prune", "remove"):
        if method in vars(theirs):
            assert parameters_of(getattr(ours, method)) == parameters_of(getattr(theirs, method))


def test_everything_public_is_documented():
    assert not [name for name in distprune.__all__ if not inspect.getdoc(getattr(distprune, name))]


@pytest.mark.thorough
@pytest.mark.slow
def test_import_does_not_load_dtensor():
    """DTensor costs more than half a second; a user on one device has no need of it.

    Nor of what only serves tests, files or other libraries, each of which loads itself.
    """
    script = """
import sys, torch
before = set(sys.modules)
def loaded(*names):
    return sorted(m for m in set(sys.modules) - before if m.split(".")[0] in names)
from distprune import *
print(loaded("torch", "accelerate", "transformers", "yaml", "pydantic", "pytest"))
print([m for m in loaded("distprune") if m.split(".")[1:2] in (["testing"], ["integrations"])])
import distprune.testing, distprune.integrations.accelerate
print(loaded("accelerate", "transformers", "yaml", "pydantic", "pytest"))
"""
    assert output_of(sys.executable, "-c", script).split() == ["[]"] * 3


@pytest.mark.slow
def test_the_bare_import_does_not_load_torch_and_any_module_may_come_first():
    script = """
import importlib, sys
import distprune
assert "torch" not in sys.modules
from distprune.recipes import Recipe
Recipe(sparsity=0.5)
assert "torch" not in sys.modules
assert distprune._compute_norm and "torch" in sys.modules
assert set(distprune.__all__) <= set(dir(distprune)) and not hasattr(distprune, "no_such_name")
for name in ("api.global_mask", "dynamic", "schedule"):
    for loaded in [each for each in sys.modules if each.partition(".")[0] == "distprune"]:
        del sys.modules[loaded]
    importlib.import_module(f"distprune.{name}")
"""
    output_of(sys.executable, "-c", script)
