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

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 15


class Solved(NamedTuple):
    """New rows, and sums over them.

    Attributes:
        weights: [rows, inputs], +0 where nothing is kept.
        errors: fp64 [3]: the squared change of the outputs by the mask alone, that by the new rows,
            and the squared outputs themselves.
    """

    weights: Tensor
    errors: Tensor


def least_squares(
    weights: Tensor, keep: Tensor, gram: Tensor, added: float = 0.0, steps: int = STEPS
) -> Solved:
    """The rows with a given support whose outputs are nearest to those of given rows.

    Args:
        weights: [rows, inputs], before they were pruned.
        keep: the same shape, 1 where an element is kept and 0 elsewhere.
        gram: [inputs, inputs], damped; of the dtype of ``weights``.
        added: the damping on its diagonal, which errors are without.
        steps: of conjugate gradients. An exact solution needs as many as a row has kept elements,
            or distinct eigenvalues; see [Note: least squares].

    Cost: 2 x rows x inputs**2 operations for each step, and for two products more; temporaries of
    six times ``weights``.
    """
    outputs = weights @ gram
    total = _inner(weights, outputs)
    new = weights * keep
    residual = outputs.sub_(new @ gram)
    before = _inner(weights - new, residual)
    residual.mul_(keep)
    inverse = _ratio(torch.ones_like(gram[0]), gram.diagonal())
    direction = residual * inverse
    change = (residual * direction).sum(1, keepdim=True)
    after = before.clone()
    for _ in range(steps):
        product = (direction @ gram).mul_(keep)
        step = _ratio(change, (direction * product).sum(1, keepdim=True))
        after -= (step * change).sum(dtype=torch.float64)
        new.addcmul_(step, direction)
        residual.addcmul_(step, product, value=-1)
        torch.mul(residual, inverse, out=product)
        before_step, change = change, (residual * product).sum(1, keepdim=True)
        direction = product.addcmul_(_ratio(change, before_step), direction)
    new = torch.where(keep != 0, new, 0)
    distances = torch.stack(
        [_inner(d, d) for d in (weights - weights * keep, weights - new, weights)]
    )
    return Solved(new, torch.stack([before, after, total]) - added * distances)


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(dtype=torch.float64)


def _ratio(values: Tensor, others: Tensor) -> Tensor:
    """values / others, and 0 where that is no number: a row that has arrived makes no step."""
    is_number = others > torch.finfo(others.dtype).tiny
    return torch.where(is_number, values / others, 0)
