"""Modules on which torch.nn.utils.prune fails; norms by hooks, quantisation, fusing, scripts."""

from __future__ import annotations

import pytest
import torch
from pruned_models import pruned_encoder_layer, pruned_lstm, sparse_values_stay_zero, train
from torch import nn

import distprune as prune
from distprune.masks.hook import find_hook


def test_an_encoder_layer_trains_and_evaluates():
    model, x = pruned_encoder_layer()
    train(model, x, steps=5)
    sparse_values_stay_zero(model)
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
