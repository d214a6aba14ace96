"""The oracle of reconstruction: each row solved on its own, by elimination, in fp64."""

import torch
from torch import Tensor


def reconstructed(weights: Tensor, keep: Tensor, gram: Tensor, damping: float) -> Tensor:
    """The rows nearest to ``weights`` in their outputs, with the support ``keep``; fp64.

    Args:
        weights, keep: [rows, inputs].
        gram: [inputs, inputs], without damping.
        damping: in units of its diagonal.
    """
    weights, gram = weights.double(), gram.double()
    diagonal = gram.diagonal()
    damped = gram + torch.where(diagonal > 0, damping * diagonal, 1).diag()
    result = torch.zeros_like(weights)
    for row, kept in enumerate(keep.bool()):
        support = kept.nonzero()[:, 0]
        if len(support):
            inner = damped[support][:, support]
            result[row, support] = torch.linalg.solve(inner, damped[support] @ weights[row])
    return result


def gram_of(rows: Tensor) -> Tensor:
    """The sum of x x^T over rows, fp64."""
    return rows.double().T @ rows.double()
