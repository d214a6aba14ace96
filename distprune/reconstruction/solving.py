"""Least squares for the rows of one matrix, each with a support of its own.

[Note: least squares] A row w0 of a weight gives the outputs w0 X for the inputs X [inputs, tokens].
With a mask, the row v that changes them least is the minimum of

    |(w0 - v) X|^2 + d |w0 - v|^2  =  (w0 - v) H (w0 - v)^T,     H = X X^T + d I,

over all v that are zero where the mask is. Only the Gram matrix X X^T is needed, all rows of a
weight have the same one, and no row needs another. The damping d makes H regular and holds v near
w0 in directions that the calibration data hardly has.

The minimum solves the normal equations, the rows and columns of H that belong to the support:
another matrix for each row. Conjugate gradients need only products with H, of all rows at once: a
gradient is multiplied with the mask, so that what is pruned stays zero, and divided by the diagonal
of H. Steps of a row depend on this row alone, so that no sharding changes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 20


def least_squares(weights: Tensor, keep: Tensor, gram: Tensor, steps: int = STEPS) -> Tensor:
    """The rows with a given support whose outputs are nearest to those of given rows.

    Args:
        weights: [rows, inputs], before they were pruned.
        keep: the same shape, 1 where an element is kept and 0 elsewhere.
        gram: [inputs, inputs], damped; of the dtype of ``weights``.
        steps: of conjugate gradients. An exact solution needs as many as a row has kept elements,
            or distinct eigenvalues; see [Note: least squares].

    Returns:
        New rows, +0 where ``keep`` is 0.

    Cost: 2 x rows x inputs**2 operations for each step; temporaries of six times ``weights``.
    """
    inverse = _ratio(torch.ones_like(gram[0]), gram.diagonal())
    new = weights * keep
    residual = ((weights - new) @ gram).mul_(keep)
    direction = residual * inverse
    change = (residual * direction).sum(1, keepdim=True)
    for _ in range(steps):
        product = (direction @ gram).mul_(keep)
        step = _ratio(change, (direction * product).sum(1, keepdim=True))
        new.addcmul_(step, direction)
        residual.addcmul_(step, product, value=-1)
        scaled = residual * inverse
        before, change = change, (residual * scaled).sum(1, keepdim=True)
        direction = scaled.addcmul_(_ratio(change, before), direction)
    return torch.where(keep != 0, new, 0)


def output_errors(difference: Tensor, gram: Tensor, added: float) -> Tensor:
    """|d X|^2 of each row d of a difference, fp64 [rows]; ``added`` is the damping in ``gram``."""
    product = (difference @ gram).add_(difference, alpha=-added)
    return (product * difference).sum(1, dtype=torch.float64)


def _ratio(values: Tensor, others: Tensor) -> Tensor:
    """values / others, and 0 where that is no number: a row that has arrived makes no step."""
    is_number = others > torch.finfo(others.dtype).tiny
    return torch.where(is_number, values / others, 0)
