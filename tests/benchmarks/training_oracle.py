"""The loss and gradients that a pruned model must have, from one process.

The oracle is a dense model whose pruned weights are zero, and whose gradients are multiplied by the
masks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from decoder import Sizes, build, loss_of
from measuring import CheckFailed
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def check(model: nn.Module, way: str, sizes: Sizes, tokens: Tensor, amount: float) -> None:
    """Compare loss and gradients of a pruned model with those of one process.

    Every rank has the same batch, and the mean of two equal gradients is exact: what is found
    must be equal bit for bit. TP alone sums in another order.
    """
    dense = build(sizes)
    keeps = expected_masks(dense, amount)
    with torch.no_grad():
        for name, keep in keeps.items():
            dense.get_parameter(name).mul_(keep)
    if "bf16" in way:
        dense.bfloat16()
    expected, loss = loss_of(dense, tokens), loss_of(model, tokens)
    expected.backward()
    loss.backward()
    compare(way, "loss", loss.detach(), expected.detach())
    for name, gradient in whole_gradients(model):
        wanted = dense.get_parameter(name).grad.to(gradient.dtype)
        compare(way, f"gradient of {name}", gradient, wanted * keeps.get(name, True))
    model.zero_grad()


def compare(way: str, what: str, found: Tensor, expected: Tensor) -> None:
    same = torch.allclose if way == "TP" else torch.equal
    if not same(found, expected):
        off = (found - expected).abs().max()
        raise CheckFailed(f"{way}: {what} of the pruned model is off by {off:.3g}")


def expected_masks(dense: nn.Module, amount: float) -> dict[str, Tensor]:
    """The masks of a global pruning by magnitude; among equal ones the first are pruned."""
    weights = {
        name: weight.detach().abs()
        for name, weight in dense.named_parameters()
        if name.endswith("weight") and "norm" not in name
    }
    scores = torch.cat([weight.flatten() for weight in weights.values()])
    order = scores.argsort(stable=True)
    keep = torch.ones(len(scores), dtype=torch.bool)
    keep[order[: round(amount * len(scores))]] = False
    parts = keep.split([weight.numel() for weight in weights.values()])
    return {
        name: part.view(weight.shape)
        for (name, weight), part in zip(weights.items(), parts, strict=True)
    }


def whole_gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """By the names that the parameters have in the dense model."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = [(name, each.grad.clone()) for name, each in model.named_parameters()]
    else:
        found = [(name, each.grad) for name, each in model.named_parameters()]
    for name, gradient in found:
        name = name.replace("_fsdp_wrapped_module.", "").removesuffix("_orig")
        yield (
            name,
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient,
        )
