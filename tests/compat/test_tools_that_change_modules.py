"""Norms by hooks, quantisation, fusing, scripts and offloading of pruned modules."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.masks.hook import find_hook

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
