"""Models to prune, and an oracle that knows the exact masks.

The oracle is numpy's partition on the bits of all magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.utils.prune as torch_prune
from measuring import CheckFailed
from torch import Tensor, nn

import distprune

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
STANDARD_DEVIATION = 0.02
# Of a Llama: MLPs of 43/16 the width, and embedding and head of about 8 times the width each.
PER_LAYER = 4 + 3 * 43 / 16
NUM_LAYERS = 12


class Layer(nn.Module):
    """The weights of a decoder layer; it has no forward, as it is only pruned."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width * 43 // 16
        self.q_proj = _linear(width, width)
        self.k_proj = _linear(width, width)
        self.v_proj = _linear(width, width)
        self.o_proj = _linear(width, width)
        self.gate_proj = _linear(width, inner)
        self.up_proj = _linear(width, inner)
        self.down_proj = _linear(inner, width)
        self.input_norm = nn.RMSNorm(width, device="meta")
        self.output_norm = nn.RMSNorm(width, device="meta")


class LanguageModel(nn.Module):
    """A dozen layers in Llama's proportions, and a vocabulary that brings it to ``num_elements``.

    At most ``num_elements``, and less than twice the width fewer. On the meta device.

    Args:
        multiple: the width is one of it. With 64, four divides the inputs of every matrix.
    """

    def __init__(self, num_elements: int, multiple: int = 16) -> None:
        super().__init__()
        if num_elements < 100_000:
            raise ValueError(f"num_elements={num_elements}; expected at least 100,000.")
        width = (num_elements / (NUM_LAYERS * PER_LAYER + 16)) ** 0.5
        width = multiple * max(1, round(width / multiple))
        num_layers = max(1, round((num_elements / width**2 - 16) / PER_LAYER))
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width, device="meta")
        left = num_elements - sum(weight.numel() for weight in self.parameters())
        vocabulary = left // (2 * width)
        self.embed_tokens = nn.Embedding(vocabulary, width, device="meta")
        self.lm_head = _linear(width, vocabulary)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta")


class Weight(nn.Module):
    """A module of one weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def build(
    num_elements: int, dtype: torch.dtype = torch.float32, multiple: int = 16, device: str = "cpu"
) -> LanguageModel:
    """A language model with weights as after initialisation."""
    model = LanguageModel(num_elements, multiple).to(dtype).to_empty(device="cpu")
    fill_normal(model)
    model.to(device)
    return model


def fill_normal(model: nn.Module, seed: int = 0) -> None:
    """Normal weights; those of norms, which are 1-d, are around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            mean = 1.0 if weight.ndim == 1 else 0.0
            weight.normal_(mean, STANDARD_DEVIATION, generator=generator)


def pairs(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """What ``global_unstructured`` takes: every weight of a plain model, in order."""
    return [
        (module, "weight")
        for module in model.modules()
        if "weight" in module._parameters or "weight_orig" in module._parameters
    ]


def weights(model: nn.Module) -> list[Tensor]:
    """The values of :func:`pairs`, as stored: without masks."""
    found = []
    for module, name in pairs(model):
        parameters = module._parameters
        found.append(parameters.get(name + "_orig", parameters.get(name)).detach())
    return found


def masks(model: nn.Module) -> list[Tensor] | None:
    """The masks of :func:`pairs`; None of a model that is not pruned."""
    found = [module._buffers.get(name + "_mask") for module, name in pairs(model)]
    return None if all(mask is None for mask in found) else found


@torch.no_grad()
def undo(model: nn.Module, values: Sequence[Tensor] = ()) -> int:
    """Take off all masks, whoever put them on; the bytes of masks and of values that hooks keep.

    Args:
        values: what this rank had of each weight before: a sharded one has zeros under its mask.
    """
    num_bytes = 0
    for module, name in pairs(model):
        mask = module._buffers.get(name + "_mask")
        if mask is None:
            continue
        product = module.__dict__.get(name)
        for held in (mask, product):
            if isinstance(held, Tensor):
                num_bytes += local(held).numel() * held.itemsize
        local(mask).fill_(1)
        is_torchs = any(
            isinstance(hook, torch_prune.BasePruningMethod)
            for hook in module._forward_pre_hooks.values()
        )
        (torch_prune if is_torchs else distprune).remove(module, name)
    for weight, value in zip(weights(model), values):  # noqa: B905
        local(weight).copy_(value)
    return num_bytes


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@dataclass(frozen=True)
class Expected:
    """What pruning by magnitude has to come to.

    Attributes:
        num_pruned: elements that are newly pruned.
        threshold: the largest magnitude that is pruned.
        num_ties: elements of this magnitude ...
        num_ties_pruned: ... and those of them that are pruned: the first ones in the order of
            (position of the parameter, row-major index).
    """

    num_pruned: int
    threshold: float
    num_ties: int
    num_ties_pruned: int


def oracle(values: Sequence[Tensor], amount: float | int) -> Expected:
    """The exact cut, found by numpy's partition of the bits of all magnitudes.

    Args:
        values: whole parameters of one floating-point dtype, in the order of the call.
        amount: a share of the elements, in (0, 1), or a count of them.

    Cost: memory for a second copy of the values.
    """
    total = sum(v.numel() for v in values)
    count = amount if isinstance(amount, int) else round(amount * total)
    if not 0 < count < total:
        raise ValueError(f"amount={amount} prunes {count} of {total} elements; it needs a cut.")
    bits = np.concatenate([_bits(value) for value in values])
    bits.partition(count - 1)
    cut = bits[count - 1]
    num_below = int(np.count_nonzero(bits[:count] < cut))
    num_ties = count - num_below + int(np.count_nonzero(bits[count:] == cut))
    threshold = torch.from_numpy(bits[count - 1 : count].copy()).view(values[0].dtype)
    return Expected(count, threshold.item(), num_ties, count - num_below)


def check_masks(values: Sequence[Tensor], found: Sequence[Tensor], expected: Expected) -> None:
    """Every bit of every mask.

    Raises:
        CheckFailed: names the parameter, and how many elements differ.
    """
    cut = _bits(torch.tensor([expected.threshold], dtype=values[0].dtype))[0]
    num_ties_left = expected.num_ties_pruned
    for which, value in enumerate(values):
        bits = _bits(value)
        keep = bits >= cut
        ties = np.flatnonzero(bits == cut)[:num_ties_left]
        keep[ties] = False
        num_ties_left -= ties.size
        num_wrong = int(np.count_nonzero(keep != _keep(found[which])))
        if num_wrong:
            raise CheckFailed(
                f"parameter {which}: {num_wrong:,} of {keep.size:,} elements of the mask are not "
                f"the oracle's ({expected})"
            )


def check_report(report: Any, expected: Expected) -> None:
    """The counts and the threshold that a pruning call reports.

    Raises:
        CheckFailed: shows both.
    """
    found = Expected(
        report.num_pruned_now, report.threshold, report.num_ties, report.num_ties_pruned
    )
    if found != expected:
        raise CheckFailed(f"the report says {found}; the oracle {expected}")


def _bits(values: Tensor) -> np.ndarray:
    """Magnitudes as integers of the same order, flat; a copy."""
    integer = INTEGERS[values.itemsize]
    bits = values.detach().reshape(-1).view(integer).cpu().numpy()
    return bits & np.array(torch.iinfo(integer).max, bits.dtype)


def _keep(mask: Tensor) -> np.ndarray:
    return (mask != 0).reshape(-1).cpu().numpy()
