"""Memory, remove and training, where torch.nn.utils.prune fails or surprises."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from equal_modules import bits, distinct, fill_distinct
from pruned_models import linear
from torch import nn

import distprune as prune


class TestMemory:
    def test_older_masks_are_left_alone(self):
        module = linear()
        masks = []
        for amount in (5, 5, 5):
            prune.l1_unstructured(module, "weight", amount)
            masks.append(module.weight_mask)
            prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=amount)
            masks.append(module.weight_mask)
        assert [int((mask == 0).sum()) for mask in masks] == [5, 10, 15, 20, 25, 30]

    def test_a_given_mask_is_not_shared_or_changed(self):
        module, mask = linear(), torch.ones(5, 6)
        mask[0] = 0
        prune.custom_from_mask(module, "weight", mask)
        prune.l1_unstructured(module, "weight", 10)
        assert int(mask.sum()) == 24
        mask.zero_()
        assert int((module.weight_mask == 0).sum()) == 16

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


class TestRemove:
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -2.0])
    @pytest.mark.parametrize("is_global", [False, True])
    def test_what_was_masked_becomes_plus_zero(self, bad, is_global):
        module = linear()
        with torch.no_grad():
            module.weight[1, 2] = bad
        mask = torch.ones(5, 6)
        mask[1, 2] = 0
        prune.custom_from_mask(module, "weight", mask)
        if is_global:
            prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=3)
        expected = torch.where(module.weight_mask == 0, 0.0, module.weight_orig.detach())
        prune.remove(module, "weight")
        assert bits(module.weight) == bits(expected)
        assert not module.weight.signbit()[1, 2]

    def test_the_order_of_parameters_stays(self):
        model = nn.Sequential(linear(), nn.LSTM(5, 3))
        parameters = list(model.parameters())
        names = list(model.state_dict())
        prune.l1_unstructured(model[0], "weight", 0.5)
        prune.l1_unstructured(model[1], "weight_ih_l0", 0.5)
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        prune.remove(model[0], "weight")
        prune.remove(model[1], "weight_ih_l0")
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
        assert list(model.state_dict()) == names

    def test_the_module_is_an_ordinary_one_again(self):
        module, plain = linear(), linear()
        for _ in range(2):
            prune.l1_unstructured(module, "weight", 0.5)
            prune.random_structured(module, "weight", 1, 0)
        module(torch.ones(1, 6)).sum().backward()
        prune.remove(module, "weight")
        assert not prune.is_pruned(module)
        assert type(module) is nn.Linear
        assert sorted(vars(module)) == sorted(vars(plain))
        assert not module._forward_pre_hooks and not module._buffers
        with pytest.raises(ValueError, match="weight"):
            prune.remove(module, "weight")


def conv_in_channels_last() -> nn.Conv2d:
    return fill_distinct(nn.Conv2d(3, 4, 2), torch.float32, 0).to(memory_format=torch.channels_last)


class TestRemoveAsTorchDoes:
    """The parameter gets other memory; whatever refers to the old one is left alone."""

    @pytest.mark.parametrize("make", [linear, conv_in_channels_last])
    def test_tensors_taken_before_keep_their_values(self, make):
        left = []
        for library in (prune, torch_prune):
            module = library.ln_structured(make(), "weight", 0.5, 2, 0)
            library.custom_from_mask(module, "weight", (module.weight.detach() > 0).contiguous())
            parameter, state, view = module.weight_orig, module.state_dict(), module.weight_orig[0]
            before = {key: bits(value) for key, value in state.items()}
            library.remove(module, "weight")
            assert module.weight is parameter
            assert {key: bits(value) for key, value in state.items()} == before
            assert torch.equal(view, state["weight_orig"][0])
            assert not state["weight_mask"].all() and not torch.equal(
                state["weight_orig"], module.weight
            )
            left.append((module.weight + 0, module.weight.stride()))
        (ours, strides), (theirs, _) = left
        # Pruned twice, torch's weight is no longer channels_last.
        assert torch.equal(ours, theirs) and strides == make().weight.stride()

    @pytest.mark.parametrize("with_penalty", [False, True])
    def test_between_forward_and_backward(self, with_penalty):
        left = []
        for library in (prune, torch_prune):
            module = library.l1_unstructured(linear(), "weight", 0.5)
            loss = module(distinct([3, 6], torch.float32, seed=1)).square().sum()
            if with_penalty:
                loss = loss + module.weight_orig.square().sum() + module.weight.abs().sum()
            library.remove(module, "weight")
            loss.backward()
            left.append((module.weight.grad, module.bias.grad))
        for ours, theirs in zip(*left, strict=True):
            assert torch.equal(ours, theirs) and ours.any()

    def test_an_optimizer_goes_on_after_remove_in_inference_mode(self):
        module = prune.l1_unstructured(linear(), "weight", 0.5)
        with torch.inference_mode():
            prune.remove(module, "weight")
        assert int((module.weight == 0).sum()) == 15
        module(torch.ones(1, 6)).sum().backward()
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        assert int((module.weight == 0).sum()) == 0


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_made_before_pruning_goes_on(make_optimizer):
    module = linear()
    arguments = {"momentum": 0.9} if make_optimizer is torch.optim.SGD else {}
    optimizer = make_optimizer(module.parameters(), lr=0.01, **arguments)
    x = torch.randn(4, 6)

    def step() -> float:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    losses = [step()]
    prune.l1_unstructured(module, "weight", 0.2)
    losses += [step() for _ in range(5)]
    assert module.weight_orig in optimizer.state
    prune.l1_unstructured(module, "weight", 0.2)
    stored = optimizer.state_dict()
    losses += [step() for _ in range(5)]
    optimizer.load_state_dict(stored)
    prune.remove(module, "weight")
    losses += [step() for _ in range(5)]
    assert losses[5] < losses[1]
    assert losses[-1] < losses[6]
