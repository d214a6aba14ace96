"""What Wanda and STADE multiply |w| by: one number for each input, from sums over tokens.

Live models and files compute it here, in fp64, and round it once to fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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


def _counts(num_tokens: int | Sequence[int]) -> int | Tensor:
    """What sums are divided by: at least 1."""
    if isinstance(num_tokens, int):
        return max(1, num_tokens)
    return torch.tensor(num_tokens, dtype=torch.float64).clamp(min=1).unsqueeze(1)
