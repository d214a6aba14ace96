"""Memory, remove and training, where torch.nn.utils.prune fails or surprises."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from equal_modules import (
    MODELS,
    distinct,
    fill_distinct,
    first_output,
    linear,
    pruned_encoder_layer,
    pruned_lstm,
    pruned_twice,
    sparse_values_stay_zero,
    train,
)
from torch import nn

import distprune as prune
from distprune.masks.hook import find_hook
from helpers.comparisons import bits, snapshot


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


# Copies and stored models, where torch.nn.utils.prune fails or surprises.


def assert_equal_states(model: nn.Module, other: nn.Module) -> None:
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


class TestCopies:
    @pytest.mark.parametrize("make", MODELS)
    def test_deepcopy_after_a_forward_with_gradients(self, make):
        model, x = make()
        first_output(model(x)).sum().backward()
        clone = copy.deepcopy(model)
        assert_equal_states(clone, model)
        # The copy owns everything it has.
        owned = {t.data_ptr() for t in [*model.parameters(), *model.buffers()]}
        assert not owned & {t.data_ptr() for t in [*clone.parameters(), *clone.buffers()]}
        before = {key: value.clone() for key, value in model.state_dict().items()}
        losses = train(clone, x)
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
        sparse_values_stay_zero(clone)
        assert train(model, x) == losses

    def test_copies_are_pruned_and_removed_alone(self):
        model, x = pruned_twice()
        model(x).sum().backward()
        clone = copy.deepcopy(model)
        hooks = {hook._tensor_name: hook for hook in clone._forward_pre_hooks.values()}
        assert hooks.keys() == {"weight", "bias"}
        methods = [type(method) for method in hooks["weight"]]
        assert methods == [prune.L1Unstructured, prune.LnStructured]
        before = snapshot(model)
        prune.l1_unstructured(clone, "weight", 2)
        prune.remove(clone, "weight")
        prune.remove(clone, "bias")
        assert snapshot(model) == before
        assert not prune.is_pruned(clone) and prune.is_pruned(model)

    @pytest.mark.parametrize("make", MODELS)
    @pytest.mark.parametrize("forward_first", [False, True])
    @pytest.mark.parametrize("through", ["pickle", "save"])
    def test_stored_and_loaded(self, make, forward_first, through):
        model, x = make()
        if forward_first:
            first_output(model(x)).sum().backward()
        if through == "pickle":
            loaded = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
        assert_equal_states(loaded, model)
        assert type(loaded).__name__ == type(model).__name__
        model.zero_grad(), loaded.zero_grad()
        assert train(loaded, x) == train(model, x)
        sparse_values_stay_zero(loaded)


# Modules on which torch.nn.utils.prune fails; norms by hooks, quantisation, fusing, scripts.


def test_an_encoder_layer_trains_and_evaluates():
    model, x = pruned_encoder_layer()
    train(model, x, steps=5)
    sparse_values_stay_zero(model)
    assert prune.verify(model).ok
    training_output = model(x)
    with torch.no_grad():
        evaluated = model.eval()(x)  # the fast path reads the weights itself
    assert torch.allclose(evaluated, training_output, atol=1e-5)
    model.train()
    for module, name in (
        (model.self_attn.out_proj, "weight"),
        (model.self_attn, "in_proj_weight"),
        (model.linear1, "weight"),
    ):
        prune.remove(module, name)
    assert torch.equal(model(x), training_output)


def test_the_flat_weights_of_an_lstm_follow():
    model, x = pruned_lstm()
    for _ in range(3):
        train(model, x)
        assert prune.verify(model).ok  # the LSTM has the weights of before the step
        model(x)
        for name, weight in zip(model._flat_weights_names, model._flat_weights, strict=True):
            assert weight is getattr(model, name)
        assert torch.equal(model.weight_hh_l0, model.weight_hh_l0_orig * model.weight_hh_l0_mask)
    prune.remove(model, "weight_hh_l0")
    prune.remove(model, "weight_ih_l0")
    assert all(isinstance(weight, nn.Parameter) for weight in model._flat_weights)
    assert [id(w) for w in model._flat_weights] == [id(p) for p in model.parameters()]


MASK = torch.tensor([[1.0, 0, 1, 0], [0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("norm", "name"), [(nn.utils.weight_norm, "weight_v"), (nn.utils.spectral_norm, "weight_orig")]
)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_norm_by_a_hook_reads_what_is_pruned_now(norm, name):
    """The norm of masked values after each step, as it is without a pruning hook."""
    torch.manual_seed(0)
    layer, x = norm(nn.Linear(4, 4)), torch.ones(1, 4)
    torch.manual_seed(0)
    oracle = norm(nn.Linear(4, 4))
    prune.custom_from_mask(layer, name, MASK)
    with torch.no_grad():
        getattr(oracle, name).mul_(MASK)
    for _ in range(3):
        losses = []
        for model, key in ((layer, f"{name}_orig"), (oracle, name)):
            loss = model(x).square().sum()
            loss.backward()
            losses.append(loss.detach())
            value = getattr(model, key)
            with torch.no_grad():
                value.sub_(value.grad * MASK)
            value.grad = None
        torch.testing.assert_close(*losses)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def fused():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    prune.l1_unstructured(net[0], "weight", 0.5)
    nn.utils.fusion.fuse_conv_bn_eval(net[0], net[1])(torch.ones(1, 3, 5, 5))


def quantised():
    torch.ao.quantization.quantize_dynamic(pruned())(torch.ones(1, 4))


def scripted():
    torch.jit.script(pruned())


def offloaded():
    net = pruned()
    pytest.importorskip("accelerate").cpu_offload(net, execution_device="cpu")
    net(torch.ones(1, 4))


def pruned():
    net = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(net[0], "weight", 0.5)
    return net


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use", [fused, quantised, scripted, offloaded])
def test_what_does_not_know_masks_says_to_remove_them_first(use):
    with pytest.raises((RuntimeError, AttributeError), match=r"distprune\.remove"):
        use()


def test_data_parallel_without_devices_is_the_module():
    """On several devices it is not supported: docs/limits.md."""
    net = nn.DataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    assert prune.global_unstructured(prune.select(net), prune.L1Unstructured, amount=8).num_pruned
    assert not net(torch.zeros(2, 4)).isnan().any()
    assert find_hook(net.module[0], "weight") is not None
