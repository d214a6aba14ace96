"""What each criterion is, written from its paper, for one process with plain tensors.

They share no code with the library: plain autograd, whole batches, float64 where it matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Named = dict[str, Tensor]


def snip(weights: Named, gradients: Sequence[Named]) -> Named:
    """1810.02340, equation 5, for the sum of the losses of all batches: |w * dL/dw|."""
    return {
        name: (w * torch.stack([g[name] for g in gradients]).sum(0)).abs()
        for name, w in weights.items()
    }


def movement(weights: Named, gradients: Sequence[Named]) -> Named:
    """2005.07683, equation 3: S = - sum over steps of dL/dW * W, here with fixed weights."""
    return {
        name: -torch.stack([g[name] * w for g in gradients]).sum(0) for name, w in weights.items()
    }


def moment(
    weights: Named, gradients: Sequence[Named], counts: Sequence[float], power: int
) -> Named:
    """1611.06440 (power 1) and 1906.10771 (power 2): |w|^p times the mean over units of |g|^p."""
    result = {}
    for name, w in weights.items():
        total = torch.zeros_like(w)
        for count, gradient in zip(counts, gradients, strict=True):
            total += count * gradient[name].abs() ** power
        result[name] = total / sum(counts) * w.abs() ** power
    return result


def fisher(weights: Named, gradients: Sequence[Named], counts: Sequence[float]) -> Named:
    """Optimal Brain Damage with the empirical Fisher information: 1/2 w^2 E[g^2]."""
    return {name: s / 2 for name, s in moment(weights, gradients, counts, 2).items()}


def wanda(weights: Named, inputs: Named) -> Named:
    """2306.11695: |W_ij| * ||X_j||, with the mean over tokens in place of the sum."""
    return {
        name: w.abs() * inputs[name].double().square().mean(0).sqrt().to(w.dtype)
        for name, w in weights.items()
    }


def stade(weights: Named, inputs: Named) -> Named:
    """2503.22451: the standard deviation of the input in place of its norm."""
    return {
        name: w.abs() * inputs[name].double().std(0, correction=0).to(w.dtype)
        for name, w in weights.items()
    }


def ria(weights: Named, inputs: Named) -> Named:
    """ICLR 2024: (|W|/sum of the column + |W|/sum of the row) * ||X_j||^0.5."""
    result = {}
    for name, w in weights.items():
        magnitude = w.double().abs()
        column, row = magnitude.sum(0, keepdim=True), magnitude.sum(1, keepdim=True)
        relative = magnitude / column.clamp(min=1e-300) + magnitude / row.clamp(min=1e-300)
        norms = inputs[name].double().square().mean(0).sqrt()
        result[name] = (relative * norms.sqrt()).to(w.dtype)
    return result
