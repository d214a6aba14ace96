"""From sums to scores: the factors of Wanda, RIA, STADE and Fisher, and the outlier ratios of OWL.

All factors are |w_ij| times a number of the input feature j, and for RIA and Fisher of the output
i. They are
computed in fp64 and rounded once to fp32. The sums of |w| that RIA needs, and the counts of OWL,
are the same on every sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune.budgets import outliers
from distprune.selection.matrix_sums import Summed, magnitude_sums
from distprune.selection.normalizing import Scored
from distprune.selection.scores import FactorScores, ScoreSource, TensorScores
from distprune.shards.factored import (
    FactoredScores,
    deviation_of_inputs,
    rank_one_fisher,
    relative_importance,
    rms_of_inputs,
)
from distprune.shards.geometry import MatrixRun
from distprune.shards.parameters import Target
from distprune.statistics.gradient_sums import GradientTotals
from distprune.statistics.layers import WeightLayout
from distprune.statistics.totals import Totals


def magnitudes_along(
    targets: Sequence[Target], layouts: Mapping[str, WeightLayout], communicator: Communicator
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum |w| of the live elements of weights, for each input feature and for each output.

    A convolution with groups is as many matrices, and so are fused experts: each input feature
    belongs to one of them.

    Args:
        targets: the same on every rank.
        layouts: how they meet their inputs, by label.
        communicator: the ranks that have them.

    Returns:
        By label, fp64: the sums over its outputs, of the input shape; and those over its inputs,
        [outputs]. Bit-equal on all ranks, and on every sharding.

    Raises:
        ValueError: a weight that is not finite; on every rank.

    Cost: two reads of the weights; two all-reduces of 8 bytes per input feature and output.
    """
    weights = []
    for target in targets:
        layout, shard = layouts[target.label], target.shard
        numbers = [
            layout.of_inputs(torch.arange(layout.num_inputs).view(layout.input_shape)),
            layout.of_outputs(torch.arange(layout.num_outputs)),
        ]
        matrix = MatrixRun.of(shard.index, numbers if target.places else ())
        places = [matrix.matrix_of(each, layout.shape) for each in numbers if target.places]
        part = Scored.of_shard(shard, TensorScores(shard.flat(shard.values)))
        weights.append(Summed(part, matrix, places, (layout.num_inputs, layout.num_outputs)))
    sums = magnitude_sums(weights, communicator)
    return {
        target.label: (of_inputs.view(layouts[target.label].input_shape), of_outputs)
        for target, (of_inputs, of_outputs) in zip(targets, sums, strict=True)
    }


def wanda(totals: Totals, layout: WeightLayout) -> FactoredScores:
    """|w_ij| * rms of x_j."""
    norms = rms_of_inputs(totals.squares, totals.num_tokens)
    return FactoredScores([[layout.of_inputs(norms).float()]])


def stade(totals: Totals, layout: WeightLayout) -> FactoredScores:
    """|w_ij| * standard deviation of x_j."""
    deviations = deviation_of_inputs(totals.sums, totals.squares, totals.num_tokens)
    return FactoredScores([[layout.of_inputs(deviations).float()]])


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
    norms = rms_of_inputs(totals.squares, totals.num_tokens) ** power
    first, second = relative_importance(norms, *magnitudes)
    return FactoredScores(
        [
            [layout.of_inputs(first).float()],
            [layout.of_outputs(second).float(), layout.of_inputs(norms).float()],
        ]
    )


def fisher(totals: GradientTotals, layout: WeightLayout) -> FactoredScores:
    """|w_ij| * sqrt(r_i * c_j / T), for the sums of the mean of g**2 over rows and over columns."""
    first, second = rank_one_fisher(
        totals.by_output, totals.by_input, totals.weight, layout.num_matrices
    )
    return FactoredScores([[layout.of_outputs(first).float(), layout.of_inputs(second).float()]])


def outlier_ratios(
    targets: Sequence[Target],
    num_live: Sequence[int],
    scores: Mapping[str, FactoredScores],
    block_of: Callable[[str], str],
    multiple: float,
    communicator: Communicator,
) -> dict[str, float]:
    """The share of live scores above a multiple of the mean score, per block. Collective.

    Args:
        targets: the parameters; the same on every rank.
        num_live: unpruned elements of every whole parameter.
        scores: of each parameter, by its label.
        block_of: from a label to the name of its block: the mean is that of a block's scores.
        multiple: of the mean.
        communicator: the ranks that have the parameters.

    Returns:
        By label, the ratio of its block.

    Cost: that of :func:`distprune.budgets.outliers.outlier_ratios`.
    """
    parts = []
    for target in targets:
        source: ScoreSource
        if target.places:
            source = FactorScores.of_shard(target.shard, scores[target.label], are_signed=True)
        else:  # of other ranks: no element of it is here
            source = TensorScores(target.shard.values)
        parts.append(Scored.of_shard(target.shard, source))
    blocks = [block_of(target.label) for target in targets]
    ratios = outliers.outlier_ratios(parts, num_live, blocks, multiple, communicator)
    return {target.label: ratio for target, ratio in zip(targets, ratios, strict=True)}
