"""The same prunings in a single process on plain tensors: `python -m tiny_llama.lone_pruning PLAN`.

The job starts this as a child without torchrun's environment. It has no wrapper, no DTensor
and no other process. All it shares with the job are the unpruned weights before each
pruning, which a lone process could not have trained bit for bit alike (sums over ranks
round differently). Masks are never read from the job: from the second pruning on, the
earlier masks are this process's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import distprune as prune
from jobs.processes import be_group_of_one, quit_group

from .model import build_model
from .pruning import METHODS


def main(plan_file: Path) -> None:
    """Follow the plan that the job wrote, and save all masks, named `{step}/{parameter}`."""
    plan = json.loads(plan_file.read_text())
    folder, exclude = plan_file.parent, plan["exclude"]
    masks = _prune("magnitude", plan["steps"]["magnitude"], exclude, folder)

    # Without a group, random pruning takes its numbers from torch's generator, as torch does.
    # With one, of whatever size, a number depends on the seed and the element's index only.
    be_group_of_one("gloo")
    masks |= _prune("random", plan["steps"]["random"], exclude, folder)

    save_file(masks, folder / plan["masks_file"])
    quit_group(0)


def _prune(
    method: str, steps: list[dict[str, object]], exclude: list[str], folder: Path
) -> dict[str, Tensor]:
    """All prunings by one method, in order, on one plain model."""
    model = build_model()
    targets = prune.select(model, exclude=exclude)
    masks: dict[str, Tensor] = {}
    for step in steps:
        _load_weights(model, folder / step["state_file"])
        torch.manual_seed(step["seed"])
        prune.global_unstructured(targets, METHODS[method], amount=step["amount"])
        for target in targets:
            module, name = target
            masks[f"{step['key']}/{target.fqn}"] = getattr(module, f"{name}_mask").bool()
    return masks


def _load_weights(model: nn.Module, file: Path) -> None:
    """Load every parameter, but no mask, into a plain model."""
    state = load_file(file).items()
    weights = {name: tensor for name, tensor in state if not name.endswith("_mask")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or any(not name.endswith("_mask") for name in missing):
        raise ValueError(f"{file.name} does not fit the plain model: {missing=}, {unexpected=}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
