"""Calls that are refused and change nothing, where torch.nn.utils.prune fails or surprises."""

from __future__ import annotations

import math

import pytest
import torch
from equal_modules import snapshot
from pruned_models import linear, pruned_twice
from torch import nn

import distprune as prune


class TestRefusals:
    @pytest.mark.parametrize("is_pruned", [False, True])
    @pytest.mark.parametrize(
        ("amount", "error"),
        [
            (math.nan, ValueError),
            (math.inf, ValueError),
            (1.5, ValueError),
            (-0.5, ValueError),
            (-1, ValueError),
            (31, ValueError),
            (True, TypeError),
            (False, TypeError),
            ("0.5", TypeError),
            (None, TypeError),
        ],
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

    @pytest.mark.parametrize("method", ["L1Unstructured", "RandomUnstructured", "Identity"])
    def test_keywords_that_the_method_does_not_accept(self, method):
        module = linear()
        before = snapshot(module)
        with pytest.raises(TypeError, match=r"ammount|no arguments"):
            prune.global_unstructured([(module, "weight")], getattr(prune, method), ammount=0.5)
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
