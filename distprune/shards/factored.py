"""Importance scores that are computed from values and a few small factors, and these factors.

Live models and files compute here what Wanda, STADE, RIA and Fisher by factors multiply |w| by, in
fp64, and round it once to fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distprune.base.blocks import WeightLayout
from distprune.base.pruned_form import is_dtensor
from distprune.shards.shard import checksums


@dataclass(frozen=True, eq=False)
class FactoredScores:
    """Importance scores |w| * m, where m is a sum of products of small factors.

    They are computed chunk by chunk while a call ranks them, in float32 (float64 for parameters of
    this dtype), and are never stored. Wanda is ``FactoredScores([[norms]])``, with the norm of
    each input feature in ``norms``, [1, in_features].

    Args:
        terms: the terms of the sum, each a sequence of factors: real floating-point tensors of as
            many dimensions as the parameter, each dimension of the parameter's size or 1; whole,
            and equal on all ranks, however the parameter is sharded.

    Raises:
        TypeError: a factor that is no whole floating-point tensor.
        ValueError: no terms, or a term without factors.
    """

    terms: Sequence[Sequence[Tensor]]

    def __post_init__(self) -> None:
        if not self.terms or not all(len(term) for term in self.terms):
            raise ValueError("terms of FactoredScores is empty, or has a term without factors.")
        for number, term in enumerate(self.terms):
            for factor in term:
                is_tensor = isinstance(factor, Tensor) and not is_dtensor(factor)
                if not is_tensor or not factor.dtype.is_floating_point:
                    kind = factor.dtype if is_tensor else type(factor).__name__
                    raise TypeError(
                        f"terms[{number}] of FactoredScores has a factor of {kind}; expected a "
                        "whole floating-point tensor, equal on all ranks."
                    )

    def check_shape(self, label: str, shape: torch.Size) -> None:
        """Raise ValueError unless every factor broadcasts to a parameter of this shape."""
        for factor in itertools.chain(*self.terms):
            pairs = zip(factor.shape, shape, strict=False)
            if factor.ndim != len(shape) or any(size not in (1, whole) for size, whole in pairs):
                raise ValueError(
                    f"{label}: importance_scores has a factor of shape {tuple(factor.shape)}; "
                    f"expected {len(shape)} dimensions, each of size 1 or that of the whole "
                    f"parameter, {tuple(shape)}."
                )

    def checksum(self) -> int:
        """A number that is almost surely different for other factors."""
        of_factors = checksums(list(itertools.chain(*self.terms)))
        return hash((tuple(map(len, self.terms)), tuple(of_factors))) & (2**63 - 1)


POWER_OF_RIA = 0.5  # of the rms of inputs, by default: the paper's a
Tokens = int | Sequence[int]  # how many there were; of fused experts, by expert


def wanda(layout: WeightLayout, squares: Tensor, num_tokens: Tokens) -> FactoredScores:
    """|w_ij| * root mean square of the input x_j, or 0 if there were no tokens.

    Args:
        layout: of the weight.
        squares: float64, of the input shape: the sum of x**2 over all tokens.
        num_tokens: how many there were; of fused experts, by expert.
    """
    return FactoredScores([[layout.of_inputs(_rms(squares, num_tokens)).float()]])


def stade(
    layout: WeightLayout, sums: Tensor, squares: Tensor, num_tokens: Tokens
) -> FactoredScores:
    """|w_ij| * standard deviation of the input x_j; of sums of x and of x**2."""
    count = _counts(num_tokens)
    variance = squares / count - (sums / count).square()
    # Of an input that is constant, rounding may leave less than 0.
    return FactoredScores([[layout.of_inputs(variance.clamp(min=0).sqrt()).float()]])


def ria(
    layout: WeightLayout,
    squares: Tensor,
    num_tokens: Tokens,
    magnitudes: Sequence[Tensor],
    power: float = POWER_OF_RIA,
) -> FactoredScores:
    """(|w_ij| / sum over outputs + |w_ij| / sum over inputs) * (rms of x_j) ** power.

    Args:
        layout, squares, num_tokens: as for :func:`wanda`.
        magnitudes: float64, the sums of |w| over outputs, of each input, and over inputs, of each
            output; where one is 0, all is pruned.
        power: of the rms.
    """
    norms = _rms(squares, num_tokens) ** power
    first, second = (torch.where(s > 0, 1 / s, 0.0) for s in magnitudes)
    by_inputs = [layout.of_inputs(norms * first.view(norms.shape)).float()]
    by_outputs = [layout.of_outputs(second).float(), layout.of_inputs(norms).float()]
    return FactoredScores([by_inputs, by_outputs])


def fisher(
    layout: WeightLayout, by_output: Tensor, by_input: Tensor, weight: float, rows: Any = None
) -> FactoredScores:
    """|w_ij| * sqrt(c_j * sqrt(r_i) / R), of the sums r and c of the mean of g**2.

    Those of r are over rows, and of c over columns; R is the sum of the roots of r. Each expert,
    and each group of a convolution, is a matrix of its own.

    Args:
        layout: of the weight.
        by_output: float64 [outputs], the sums of weight * g**2 over rows, matrix by matrix.
        by_input: float64, of the input shape: those over columns, matrix by matrix.
        weight: the sum of the weights of all batches; above 0.
        rows: a tensor or an array: the sums over all rows of the matrix, where ``by_output`` has
            those over a part of them.
    """
    roots = by_output.sqrt().reshape(layout.num_matrices, -1)
    whole = roots if rows is None else torch.as_tensor(rows).sqrt().reshape(layout.num_matrices, -1)
    # One after the other, and not by rows: the sum of one matrix has the same bits, whatever
    # else is stored beside it.
    totals = torch.stack([each.sum() for each in whole]).unsqueeze(1)
    shares = torch.where(totals > 0, roots / totals, 0.0).sqrt().reshape(by_output.shape)
    columns = (by_input / weight).sqrt()
    return FactoredScores([[layout.of_outputs(shares).float(), layout.of_inputs(columns).float()]])


def _rms(squares: Tensor, num_tokens: Tokens) -> Tensor:
    return (squares / _counts(num_tokens)).sqrt()


def _counts(num_tokens: Tokens) -> int | Tensor:
    """What sums are divided by: at least 1."""
    if isinstance(num_tokens, int):
        return max(1, num_tokens)
    return torch.tensor(num_tokens, dtype=torch.float64).clamp(min=1).unsqueeze(1)
