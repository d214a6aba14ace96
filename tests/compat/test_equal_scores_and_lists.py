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


class TestGlobalLists:
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
