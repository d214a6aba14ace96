"""How much memory a run over windows takes on a rank: an estimate, part by part."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distprune._common.naming import unwrap
from distprune._common.pruned_form import is_dtensor, local_tensor
from distprune._transformers.building import decoder_layers
from distprune.api.select import head_of
from distprune.language_models.losses import SLICE, BatchLosses


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that a rank needs at a time, by what they are for.

    Attributes:
        parts: "weights" are there when the model is loaded; the others come with the run.
    """

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of the parts, some of which are not there at the same time."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_in_gb(size)}" for name, size in self.parts.items() if size)
        return f"{_in_gb(self.total)} ({parts})"


def estimate_memory(
    model: nn.Module,
    num_tokens: int,
    *,
    gradients_of: Collection[Tensor] = (),
    values_kept: int = 0,
) -> MemoryEstimate:
    """Estimate the memory that this rank needs, at most, to run batches. Local.

    It knows of linear layers and of FSDP2; it does not know of fused experts, of the attention's
    own matrices, and of what libraries take.

    Args:
        model: plain or wrapped.
        num_tokens: of a batch of one rank.
        gradients_of: the parameters that have gradients; none: there is no backward.
        values_kept: fp32 values for each element of these: 1 for scores, 2 for AdamW.

    Cost: walks over the modules; no communication.
    """
    item = next(model.parameters()).itemsize
    gathered, of_gradients = _gathered(model, {id(tensor) for tensor in gradients_of})
    shards = sum(map(_nbytes, gradients_of))
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        shards += sum(map(_nbytes, model.parameters()))  # its buckets
    head = head_of(model)
    features = linear_features(model, head)
    if not gradients_of:  # one layer at a time
        features //= max(1, len(decoder_layers(unwrap(model))))
    vocabulary = 0 if head is None else getattr(head, "weight", next(head.parameters())).shape[0]
    logits = num_tokens * vocabulary
    if BatchLosses(model).has_slices:
        logits = min(logits, SLICE)
    parts = {
        "weights": sum(map(_nbytes, (*model.parameters(), *model.buffers()))),
        "gathered weights": gathered,
        "gradients": shards + of_gradients,
        "accumulated values": values_kept * 4 * sum(local_tensor(p).numel() for p in gradients_of),
        "hidden states": 2 * num_tokens * features * item,
        "logits": (3 if gradients_of else 2) * 4 * logits,
    }
    return MemoryEstimate(parts)


def linear_features(module: nn.Module, head: nn.Module | None = None) -> int:
    """Numbers of a token that linear layers are called with and return, but for the head."""
    linear = [m for m in module.modules() if isinstance(m, nn.Linear) and m is not head]
    return sum(m.in_features + m.out_features for m in linear)


def available_memory(device: torch.device) -> int | None:
    """Bytes that this rank may still take, its share of the machine's; None if nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    file = Path("/proc/meminfo")
    if device.type != "cpu" or not file.exists():
        return None
    lines = file.read_text().splitlines()
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")]
    return found[0] // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if found else None


def _gathered(model: nn.Module, read: set[int]) -> tuple[int, int]:
    """What FSDP2 gathers, and the gradients of it: of the root, and of the largest other group.

    Each is there twice for a while: as one buffer, on the wire, and as tensors.
    """
    groups = [module for module in model.modules() if hasattr(module, "set_reshard_after_forward")]
    seen: set[int] = set()
    weights, gradients = [0], [0]
    for module in reversed(groups):  # inner ones first
        own = [p for p in module.parameters() if id(p) not in seen and is_dtensor(p)]
        sizes = {id(p): p.numel() * p.itemsize for p in own}
        seen |= sizes.keys()
        weights.append(sum(sizes.values()))
        gradients.append(sum(size for key, size in sizes.items() if key in read))
    # The root is the last one.
    return (
        2 * (weights[-1] + max(weights[:-1], default=0)),
        2 * (gradients[-1] + max(gradients[:-1], default=0)),
    )


def _nbytes(tensor: Tensor) -> int:
    return local_tensor(tensor).nbytes


def _in_gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
