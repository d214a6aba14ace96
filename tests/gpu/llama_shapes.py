"""Weights in the shapes of Llama-3-8B, on a device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_WIDTH, _HIDDEN, _KEYS, _VOCABULARY, _NUM_LAYERS = 4096, 14336, 1024, 128_256, 32


def shapes(num_layers: int = _NUM_LAYERS, shrink: int = 1) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of the matrices; ``shrink`` divides every size."""
    width, hidden, keys, vocabulary = (
        size // shrink for size in (_WIDTH, _HIDDEN, _KEYS, _VOCABULARY)
    )
    yield "embed_tokens", (vocabulary, width)
    for layer in range(num_layers):
        for name in ("q_proj", "o_proj"):
            yield f"layers.{layer}.{name}", (width, width)
        for name in ("k_proj", "v_proj"):
            yield f"layers.{layer}.{name}", (keys, width)
        for name in ("gate_proj", "up_proj"):
            yield f"layers.{layer}.{name}", (hidden, width)
        yield f"layers.{layer}.down_proj", (width, hidden)
    yield "lm_head", (vocabulary, width)


def weights(
    dtype: torch.dtype, device: torch.device, *, quick: bool, num_layers: int = _NUM_LAYERS
) -> dict[str, Tensor]:
    """Normal weights, of another scale in each matrix: 8.03 billion, or 14,000 in a rehearsal."""
    generator = torch.Generator(device).manual_seed(0)
    wanted = shapes(1, shrink=256) if quick else shapes(num_layers)
    return {
        name: torch.empty(shape, dtype=dtype, device=device).normal_(
            std=0.01 + 0.001 * (number % 7), generator=generator
        )
        for number, (name, shape) in enumerate(wanted)
    }


def check_cut(tensors: list[Tensor], kept: list[Tensor], k: int) -> str | None:
    """Whether masks keep the k largest magnitudes; of equal ones, those of the highest places.

    Independent of distprune, and without a sort: everything pruned lies before everything kept.

    Returns:
        What is wrong, or None.
    """
    number = sum(int(mask.sum()) for mask in kept)
    if number != k:
        return f"{number} elements are kept, expected {k}"
    largest, smallest = -torch.inf, torch.inf
    for tensor, mask in zip(tensors, kept, strict=True):
        magnitudes = tensor.abs()
        largest = max(largest, float(magnitudes.masked_fill(mask, -torch.inf).max()))
        smallest = min(smallest, float(magnitudes.masked_fill_(~mask, torch.inf).min()))
    if largest > smallest:
        return f"an element of magnitude {largest} is pruned, and one of {smallest} is kept"
    if largest == smallest:
        flags = [mask[tensor.abs() == largest] for tensor, mask in zip(tensors, kept, strict=True)]
        ties = torch.cat(flags).int()
        if bool((ties.diff() < 0).any()):
            return "of equal magnitudes, an earlier one is kept and a later one is pruned"
    return None
