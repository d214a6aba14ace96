"""Memory of a device: leaks, too little of it, pinned host memory, expandable segments."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from device_clock import allocated, release
from stage import NotTried, Stage, main, prune
from torch import nn

import distprune


def network(stage: Stage, seed: int = 0) -> nn.Sequential:
    width = 32 if stage.quick else 2048
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


def repeated_calls(stage: Stage) -> None:
    """Memory after a call does not grow with the number of calls."""
    model = network(stage).to(stage.device)
    sizes = []
    number = 4 if stage.quick else 20
    for _ in range(number):
        prune(model, 0.3)
        for module, name in distprune.select(model, everything=True):
            distprune.remove(module, name)
        release(stage.device)
        sizes.append(allocated(stage.device))
    stage.check(
        f"as much memory after {number} calls as after 2", sizes[-1] == sizes[1], f"{sizes[1:]}"
    )


def too_little_memory(stage: Stage) -> None:
    """An error in the middle of a call leaves the model as it was, and a later call works."""
    if stage.device.type != "cuda":
        raise NotTried("needs a limit of a device's memory")
    model = network(stage).to(stage.device)
    before = copy.deepcopy(model.state_dict())
    names = {name: list(module._buffers) for name, module in model.named_modules()}
    release(stage.device)
    total = torch.cuda.get_device_properties(stage.device).total_memory
    # Room for the masks of one layer or two, and not for all.
    limit = torch.cuda.memory_reserved(stage.device) + 24 * 2**20
    torch.cuda.set_per_process_memory_fraction(limit / total, stage.device)
    raised = None
    try:
        prune(model, 0.3)
    except Exception as error:  # the type is what is looked at
        raised = error
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, stage.device)
    stage.check("an error was raised", raised is not None, f"{type(raised).__name__}: {raised}")
    same = {name: list(module._buffers) for name, module in model.named_modules()} == names
    state = model.state_dict()
    same = same and list(state) == list(before)
    same = same and all(torch.equal(state[key], before[key]) for key in before)
    stage.check("the model is as it was", same)
    prune(model, 0.3)
    zeros = sum(int((layer.weight == 0).sum()) for layer in model)
    n = sum(layer.weight.numel() for layer in model)
    stage.check("a later call prunes exactly", zeros == round(0.3 * n), f"{zeros} of {n}")


def pinned_memory(stage: Stage) -> None:
    """Weights in pinned host memory are pruned as others on a CPU, and stay there."""
    if stage.device.type == "cpu":
        raise NotTried("nothing pins memory here")
    plain = network(stage)
    pinned = copy.deepcopy(plain)
    for parameter in pinned.parameters():
        parameter.data = parameter.data.pin_memory()
    for model in (plain, pinned):
        prune(model, 0.3)
    for one, other in zip(plain, pinned, strict=True):
        stage.check("masks are equal", torch.equal(one.weight_mask, other.weight_mask))
        stage.check("the weight is still pinned", other.weight_orig.is_pinned())
    on_device = copy.deepcopy(pinned).to(stage.device, non_blocking=True)
    prune(on_device, 0.3)
    prune(plain, 0.3)
    for one, other in zip(plain, on_device, strict=True):
        same = torch.equal(one.weight_mask, other.weight_mask.cpu())
        stage.check("masks that came along, and the next ones, are equal", same)


def expandable_segments(stage: Stage) -> None:
    with_allocator(stage, "expandable_segments:True")


def asynchronous_allocator(stage: Stage) -> None:
    with_allocator(stage, "backend:cudaMallocAsync")


def with_allocator(stage: Stage, setting: str) -> None:
    """The stage on masks, with small sizes, by another allocator."""
    if stage.device.type != "cuda":
        raise NotTried("is a setting of CUDA's allocator")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "parts.json")
        script = Path(__file__).with_name("stage_masks.py")
        command = [sys.executable, str(script), "--json", str(path), "--quick"]
        environment = {
            **os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting,
        }  # fmt: skip
        code = subprocess.run(command, env=environment, check=False, timeout=60).returncode
        parts = json.loads(path.read_text()) if path.exists() else []
    for reason in [reason for part in parts for reason in part["wrong"]][:5]:
        stage.check(f"with {setting}: {reason}", False)
    stage.check(f"masks are those of the CPU with {setting}", code == 0, f"code {code}")


if __name__ == "__main__":
    main(
        repeated_calls,
        too_little_memory,
        pinned_memory,
        expandable_segments,
        asynchronous_allocator,
    )
