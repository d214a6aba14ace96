"""What each criterion is, written from its paper, for one process with plain tensors.

They share no code with the library: plain autograd, whole batches, float64 where it matters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

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


def adam(weights: Named, gradients: Sequence[Named], beta: float) -> Named:
    """1/2 w^2 v with the bias-corrected second moment of 1412.6980, algorithm 1."""
    result = {}
    for name, w in weights.items():
        second = torch.zeros_like(w)
        for gradient in gradients:
            second = beta * second + (1 - beta) * gradient[name] ** 2
        result[name] = w**2 * second * (0.5 / (1 - beta ** len(gradients)))
    return result


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


def grasp(
    model: nn.Module, names: Sequence[str], losses: Sequence[Callable[[nn.Module], Tensor]]
) -> Named:
    """2002.07376, equation 8: theta * (H g); with the exact Hessian, by double backward.

    Args:
        losses: one per batch; the criterion's loss is their sum.
    """
    parameters = [model.get_parameter(name) for name in names]
    total = sum(loss(model) for loss in losses)
    gradients = torch.autograd.grad(total, parameters, create_graph=True)
    dot = sum((g.detach() * g).sum() for g in gradients)
    products = torch.autograd.grad(dot, parameters, allow_unused=True)
    return {
        name: (torch.zeros_like(w) if p is None else p) * w.detach()
        for name, w, p in zip(names, parameters, products, strict=True)
    }


def synflow(model: nn.Module, names: Sequence[str], ones: Tensor, masks: Named) -> Named:
    """2006.05467, equation 2 and the authors' code: R_SF of |theta| for an input of ones.

    Args:
        masks: by name; multiplied into the parameter before the forward.
    """
    model = copy.deepcopy(model).eval()
    state = {
        name: value.detach().abs() if value.is_floating_point() else value.detach()
        for name, value in model.state_dict().items()
    }
    leaves = {name: state[name].clone().requires_grad_() for name in names}
    effective = {name: leaf * masks.get(name, 1) for name, leaf in leaves.items()}
    torch.func.functional_call(model, state | effective, ones).sum().backward()
    return {name: (leaf.grad * leaf).detach().abs() for name, leaf in leaves.items()}


def synflow_masks(
    model: nn.Module, names: Sequence[str], ones: Tensor, sparsity: float, rounds: int
) -> Named:
    """Algorithm 1: after round e of E a share of (1 - sparsity)**(e / E) is left, exactly.

    Equal scores in the order of the parameters and of their elements.
    """
    masks = {name: torch.ones_like(model.get_parameter(name)) for name in names}
    total = sum(mask.numel() for mask in masks.values())
    for number in range(1, rounds + 1):
        scores = synflow(model, names, ones, masks)
        flat = torch.cat([scores[name].flatten() for name in names])
        keep = torch.cat([masks[name].flatten() for name in names])
        share = 1 - (1 - sparsity) ** (number / rounds) if number < rounds else sparsity
        flat = torch.where(keep == 0, -1, flat)  # pruned ones come first
        keep[torch.argsort(flat, stable=True)[: round(share * total)]] = 0
        parts = keep.split([mask.numel() for mask in masks.values()])
        masks = {name: part.view_as(masks[name]) for name, part in zip(names, parts, strict=True)}
    return masks
