"""From sums to scores: the factors of Wanda, RIA and STADE.

All of them are |w_ij| times a number of the input feature j, and for RIA of the output i. They are
computed in fp64 and rounded once to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distprune._common.input_factors import deviation_of_inputs, rms_of_inputs
from distprune.shards.factored import FactoredScores
from distprune.statistics.layers import WeightLayout
from distprune.statistics.totals import Totals


def wanda(totals: Totals, layout: WeightLayout) -> FactoredScores:
    """|w_ij| * rms of x_j."""
    norms = rms_of_inputs(totals.squares, totals.num_tokens)
    return FactoredScores([[_rounded(layout.of_inputs(norms))]])


def stade(totals: Totals, layout: WeightLayout) -> FactoredScores:
    """|w_ij| * standard deviation of x_j."""
    deviations = deviation_of_inputs(totals.sums, totals.squares, totals.num_tokens)
    return FactoredScores([[_rounded(layout.of_inputs(deviations))]])


def ria(
    totals: Totals, layout: WeightLayout, magnitudes: tuple[Tensor, Tensor], power: float
) -> FactoredScores:
    """(|w_ij| / sum over outputs + |w_ij| / sum over inputs) * (rms of x_j) ** power.

    Args:
        totals: of the inputs.
        layout: of the weight.
        magnitudes: the sums of |w| over outputs, of the input shape, and over inputs, [outputs].
        power: of the norm.
    """
    over_outputs, over_inputs = magnitudes
    norms = rms_of_inputs(totals.squares, totals.num_tokens) ** power
    return FactoredScores(
        [
            [_rounded(layout.of_inputs(norms * _inverse(over_outputs)))],
            [
                _rounded(layout.of_outputs(_inverse(over_inputs))),
                _rounded(layout.of_inputs(norms)),
            ],
        ]
    )


def _inverse(sums: Tensor) -> Tensor:
    """1 / sums; 0 where all is pruned: nothing is there to be scored."""
    return torch.where(sums > 0, 1 / sums, 0.0)


def _rounded(factor: Tensor) -> Tensor:
    return factor.float()
