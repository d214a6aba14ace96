"""Importance scores that are computed from values and a few small factors, and these factors.

Live models and files compute here what Wanda, STADE, RIA and Fisher by factors multiply |w| by, in
fp64, and round it once to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distprune._common.pruned_form import is_dtensor
from distprune.shards.checksum import checksums


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
            raise ValueError(
                "terms of FactoredScores is empty, or has a term without factors; expected at "
                "least one factor in each term."
            )
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
        for term in self.terms:
            for factor in term:
                fits = factor.ndim == len(shape) and all(
                    size in (1, whole) for size, whole in zip(factor.shape, shape, strict=True)
                )
                if not fits:
                    raise ValueError(
                        f"{label}: importance_scores has a factor of shape {tuple(factor.shape)}; "
                        f"expected {len(shape)} dimensions, each of size 1 or that of the whole "
                        f"parameter, {tuple(shape)}."
                    )

    def checksum(self) -> int:
        """A number that is almost surely different for other factors."""
        factors = [factor for term in self.terms for factor in term]
        return hash((tuple(map(len, self.terms)), tuple(checksums(factors)))) & (2**63 - 1)

    def equals(self, other: FactoredScores) -> bool:
        """Whether all terms have equal factors."""
        return [len(term) for term in self.terms] == [len(term) for term in other.terms] and all(
            torch.equal(mine, its)
            for term, other_term in zip(self.terms, other.terms, strict=True)
            for mine, its in zip(term, other_term, strict=True)
        )


POWER_OF_RIA = 0.5  # of the rms of inputs, by default: the paper's a


def rms_of_inputs(squares: Tensor, num_tokens: int | Sequence[int]) -> Tensor:
    """The root mean square of each input; 0 if there were no tokens.

    Args:
        squares: float64, the sum of x**2 over all tokens.
        num_tokens: how many there were; of fused experts, whose sums are [experts, inputs], by
            expert.
    """
    return (squares / _counts(num_tokens)).sqrt()


def deviation_of_inputs(sums: Tensor, squares: Tensor, num_tokens: int | Sequence[int]) -> Tensor:
    """The standard deviation of each input; 0 if there were no tokens.

    Args:
        sums, squares: float64, the sums of x and of x**2 over all tokens.
        num_tokens: as for :func:`rms_of_inputs`.
    """
    count = _counts(num_tokens)
    variance = squares / count - (sums / count).square()
    # Of an input that is constant, rounding may leave less than 0.
    return variance.clamp(min=0).sqrt()


def relative_importance(
    norms: Tensor, over_outputs: Tensor, over_inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """RIA's factors: |w_ij| is multiplied by first_j + second_i * norms_j, each as float32.

    Args:
        norms: float64, of each input.
        over_outputs: float64, of each input: the sum of |w| over the outputs.
        over_inputs: float64, of each output: the sum of |w| over the inputs.

    Returns:
        The first, of each input, and the second, of each output; 0 where all is pruned.
    """
    first, second = (torch.where(s > 0, 1 / s, 0.0) for s in (over_outputs, over_inputs))
    return norms * first, second


def rank_one_fisher(
    by_output: Tensor, by_input: Tensor, weight: float, num_matrices: int
) -> tuple[Tensor, Tensor]:
    """The factors of Fisher by factors: |w_ij| is multiplied by first_i * second_j.

    ``first_i * second_j`` is the root of r_i * c_j / T, where r and c are the sums of the mean of
    g**2 over rows and over columns of a matrix, and T is the sum of all of it.

    Args:
        by_output: float64 [outputs], the sums of weight * g**2 over rows, matrix by matrix.
        by_input: float64, those over columns, matrix by matrix.
        weight: the sum of the weights of all batches; above 0.
        num_matrices: fused experts, or groups of a convolution; each has a T of its own.

    Returns:
        Shaped as the arguments; 0 where T is 0.
    """
    # One after the other, and not by rows: the sum of one matrix has the same bits, whatever
    # else is stored beside it.
    totals = torch.stack([c.sum() for c in by_input.reshape(num_matrices, -1)])
    shares = by_input.reshape(num_matrices, -1) / totals.unsqueeze(1)
    shares = torch.where(totals.unsqueeze(1) > 0, shares, 0.0)
    return (by_output / weight).sqrt(), shares.sqrt().reshape(by_input.shape)


def _counts(num_tokens: int | Sequence[int]) -> int | Tensor:
    """What sums are divided by: at least 1."""
    if isinstance(num_tokens, int):
        return max(1, num_tokens)
    return torch.tensor(num_tokens, dtype=torch.float64).clamp(min=1).unsqueeze(1)
