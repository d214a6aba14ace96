"""What Wanda, STADE and RIA multiply |w| by: numbers of inputs and outputs, from sums.

Live models and files compute it here, in fp64, and round it once to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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


def _counts(num_tokens: int | Sequence[int]) -> int | Tensor:
    """What sums are divided by: at least 1."""
    if isinstance(num_tokens, int):
        return max(1, num_tokens)
    return torch.tensor(num_tokens, dtype=torch.float64).clamp(min=1).unsqueeze(1)
