"""Sums over weights that scores and budgets need: of |w| for RIA, and outliers for OWL.

They are the same on every sharding. The factors of the scores are in :mod:`shards.factored`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from distprune._common.collectives import Communicator
from distprune.budgets import outliers
from distprune.selection.matrix_sums import Summed, magnitude_sums
from distprune.selection.normalizing import Scored
from distprune.selection.scores import FactorScores, ScoreSource, TensorScores
from distprune.shards.factored import FactoredScores
from distprune.shards.parameters import Target
from distprune.statistics.layers import WeightLayout


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
    weights = [
        Summed.of(
            Scored.of_shard(target.shard, TensorScores(target.shard.flat(target.shard.values))),
            target.shard.index,
            layouts[target.label],
            is_here=bool(target.places),
        )
        for target in targets
    ]
    sums = magnitude_sums(weights, communicator)
    return {
        target.label: (of_inputs.view(layouts[target.label].input_shape), of_outputs)
        for target, (of_inputs, of_outputs) in zip(targets, sums, strict=True)
    }


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
