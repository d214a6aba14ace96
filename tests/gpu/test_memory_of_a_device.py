"""Memory of a device: leaks, too little of it, pinned host memory, other allocators."""

import copy
import gc
import sys
from pathlib import Path

import pytest
import torch
from sharded_on_device import prune
from torch import nn

import distprune
from helpers.forked_scripts import environment, output_of

pytestmark = pytest.mark.gpu


def network(is_small):
    width = 32 if is_small else 2048
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


@pytest.fixture
def on_cuda(device):
    if device.type != "cuda":
        pytest.skip("is of CUDA")
    gc.collect()
    torch.cuda.empty_cache()


def test_repeated_calls_leave_nothing(device, on_cuda, is_small):
    model, sizes = network(is_small).to(device), []
    for _ in range(20):
        prune(model, 0.3)
        for module, name in distprune.select(model, everything=True):
            distprune.remove(module, name)
        gc.collect()
        sizes.append(torch.cuda.memory_allocated(device))
    assert sizes[-1] == sizes[1]


def test_too_little_memory(device, on_cuda, is_small):
    """An error in the middle of a call leaves the model as it was, and a later call works."""
    model = network(is_small).to(device)
    before = copy.deepcopy(model.state_dict())
    total = torch.cuda.get_device_properties(device).total_memory
    # Room for the masks of one layer or two, and not for all.
    limit = torch.cuda.memory_reserved(device) + 24 * 2**20
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        with pytest.raises(Exception, match="memory"):
            prune(model, 0.3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    state = model.state_dict()
    assert list(state) == list(before)
    assert all(torch.equal(state[key], before[key]) for key in before)
    prune(model, 0.3)
    zeros = sum(int((layer.weight == 0).sum()) for layer in model)
    assert zeros == round(0.3 * sum(layer.weight.numel() for layer in model))


def test_pinned_memory(device, on_cuda, is_small):
    """Weights in pinned host memory are pruned as others on a CPU, and stay there."""
    plain = network(is_small)
    pinned = copy.deepcopy(plain)
    for parameter in pinned.parameters():
        parameter.data = parameter.data.pin_memory()
    prune(plain, 0.3)
    prune(pinned, 0.3)
    assert all(layer.weight_orig.is_pinned() for layer in pinned)
    moved = copy.deepcopy(pinned).to(device, non_blocking=True)
    prune(moved, 0.3)
    prune(plain, 0.3)
    prune(pinned, 0.3)
    for one, *others in zip(plain, pinned, moved, strict=True):
        assert all(torch.equal(one.weight_mask, other.weight_mask.cpu()) for other in others)


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_allocators(device, on_cuda, setting):
    """Masks are those of the CPU."""
    file = Path(__file__).with_name("test_masks_on_device.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--device", device.type, str(file)]
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    output_of(*command, "-k", "few", env=environment(**dict.fromkeys(names, setting)))
