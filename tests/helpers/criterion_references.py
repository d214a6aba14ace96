"""What each criterion is, written from its paper, for one process with plain tensors.

They share no code with the library: plain autograd, whole batches, float64 where it matters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Named = dict[str, Tensor]


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
