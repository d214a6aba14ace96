"""Equal scores and lists of parameters, where torch.nn.utils.prune fails or surprises."""

from __future__ import annotations

import pickle

import pytest
import torch
from pruned_models import linear
from torch import nn

import distprune as prune


class TestEqualScores:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("shape", [(11,), (4, 5), (3, 2, 4), (300, 500)])
    def test_the_lower_index_goes_first(self, dtype, shape):
        for k in (1, 3, 7):
            module = nn.Module()
            module.weight = nn.Parameter(torch.full(shape, -0.5, dtype=dtype))
            prune.l1_unstructured(module, "weight", k)
            prune.l1_unstructured(module, "weight", 2)
            assert module.weight_mask.flatten().nonzero()[0].item() == k + 2
            assert int((module.weight_mask == 0).sum()) == k + 2

    def test_zeros_are_equal_whatever_their_sign(self):
        module = nn.Module()
        module.weight = nn.Parameter(torch.tensor([0.0, -0.0, 0.0, -0.0, 1e-45]))
        prune.l1_unstructured(module, "weight", 3)
        assert module.weight_mask.tolist() == [0, 0, 0, 1, 1]

    def test_channels_of_equal_norm(self):
        module = nn.Linear(5, 4)
        with torch.no_grad():
            module.weight.fill_(0.1)
        prune.ln_structured(module, "weight", 2, 2, 1)
        assert module.weight_mask[0].tolist() == [0, 0, 1, 1, 1]

    def test_global_order_is_that_of_the_list(self):
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        for layer in model:
            nn.init.ones_(layer.weight)
        pairs = [(model[1], "weight"), (model[0], "weight")]
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=5)
        assert model[1].weight_mask.flatten().tolist() == [0, 0, 0, 0]
        assert model[0].weight_mask.flatten().tolist() == [0, 1, 1, 1]


class TestGlobalLists:
    def test_tied_parameters_count_once(self):
        first, second = linear(), linear(1)
        second.weight = first.weight
        pairs = [(first, "weight"), (second, "weight")]
        report = prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
        assert (report.num_elements, report.num_pruned) == (30, 15)
        assert int((first.weight_mask == 0).sum()) == 15
        assert torch.equal(first.weight_mask, second.weight_mask)
        prune.remove(first, "weight")
        prune.remove(second, "weight")
        assert first.weight is second.weight
        assert int((first.weight == 0).sum()) == 15

    def test_duplicates_count_once(self):
        module = linear()
        pairs = [(module, "weight"), (module, "weight")]
        report = prune.global_unstructured(pairs, prune.L1Unstructured, amount=6)
        assert report.num_pruned == int((module.weight_mask == 0).sum()) == 6
        assert len(module._forward_pre_hooks) == 1

    def test_a_generator_is_read_once(self):
        model = nn.Sequential(linear(), linear(1))
        pairs = ((layer, "weight") for layer in model)
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=20)
        assert sum(int((layer.weight_mask == 0).sum()) for layer in model) == 20

    def test_masks_are_held_once(self):
        model = nn.Sequential(linear(), linear(1))
        for _ in range(3):
            prune.global_unstructured(prune.select(model), prune.L1Unstructured, amount=0.1)
            for layer in model:
                (hook,) = layer._forward_pre_hooks.values()
                methods = hook if isinstance(hook, prune.PruningContainer) else [hook]
                for method in methods:
                    assert method.mask.data_ptr() == layer.weight_mask.data_ptr()
                # Nor is it a part of something larger.
                assert layer.weight_mask.untyped_storage().nbytes() == 30 * 4

    def test_a_small_layer_beside_a_large_one_is_stored_small(self):
        small, large = linear(), nn.Linear(300, 300)
        pairs = [(small, "weight"), (large, "weight")]
        alone = len(pickle.dumps(prune.l1_unstructured(linear(), "weight", 3)))
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
        assert len(pickle.dumps(small)) < 2 * alone
