"""From sums to scores: the factors of Wanda, RIA and STADE, and the outlier ratios of OWL.

All factors are |w_ij| times a number of the input feature j, and for RIA of the output i. They are
computed in fp64 and rounded once to fp32. The sums of |w| that RIA needs, and the counts of OWL,
are the same on every sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distprune._common import exact_sums, memory
from distprune._common.collectives import Communicator
from distprune._common.input_factors import deviation_of_inputs, rms_of_inputs
from distprune._common.memory import Count, Scratch
from distprune.call.comparing import is_on_rank
from distprune.selection.normalizing import (
    Scored,
    grid_sums,
    largest_scores,
    live_array,
    live_flags,
    per_chunk,
)
from distprune.selection.scores import FactorScores, ScoreSource, TensorScores, widened
from distprune.shards.factored import FactoredScores
from distprune.shards.shard import FlatShard, LocalShard
from distprune.shards.target import Target
from distprune.statistics.layers import WeightLayout
from distprune.statistics.totals import Totals

_CHUNK = 1 << 17  # elements that are converted to fp64 at a time


def magnitudes_along(
    targets: Sequence[Target], layouts: Sequence[WeightLayout], communicator: Communicator
) -> list[tuple[Tensor, Tensor]]:
    """Sum |w| of the live elements of weights, for each input feature and for each output.

    A convolution with groups is as many matrices, and so are fused experts: each input feature
    belongs to one of them.

    Args:
        targets: the same on every rank.
        layouts: how they meet their inputs.
        communicator: the ranks that have them.

    Returns:
        Per weight, fp64: the sums over its outputs, of the input shape; and those over its inputs,
        [outputs]. Bit-equal on all ranks.

    Raises:
        ValueError: a sum that is not finite; on every rank.

    Cost: one read of the weights; one all-reduce of 8 bytes per input feature and output.
    """
    sizes = [layout.num_inputs + layout.num_outputs for layout in layouts]

    def add_up() -> Tensor:
        parts = [
            _local_sums(target.shard, layout, is_counted=_counts(target.shard, communicator.rank))
            for target, layout in zip(targets, layouts, strict=True)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    shared = communicator.reduce_floats(sum(sizes), add_up)
    results = []
    for target, layout, row in zip(targets, layouts, torch.split(shared, sizes), strict=True):
        if not bool(torch.isfinite(row).all()):
            raise ValueError(
                f"{target.label}: the sum of its magnitudes is not finite; expected finite weights."
            )
        of_inputs, of_outputs = torch.split(row, [layout.num_inputs, layout.num_outputs])
        results.append((of_inputs.view(layout.input_shape), of_outputs))
    return results


def _counts(shard: LocalShard, rank: int) -> bool:
    return shard.replica == 0 and is_on_rank(shard, rank)


def _local_sums(shard: LocalShard, layout: WeightLayout, *, is_counted: bool) -> Tensor:
    """This rank's share: fp64 [inputs + outputs], on the CPU."""
    device = shard.values.device
    num_matrices, num_row_dims = layout.num_matrices, 2 if layout.are_experts else 1
    rows, columns = math.prod(layout.shape[:num_row_dims]), math.prod(layout.shape[num_row_dims:])
    # Of the weight as a matrix; the columns of each group have sums of their own.
    of_rows = torch.zeros(rows, dtype=torch.float64, device=device)
    of_columns = torch.zeros(num_matrices * columns, dtype=torch.float64, device=device)
    rows_of_matrix = max(1, rows // max(1, num_matrices))
    if is_counted and shard.values.numel():
        if isinstance(shard, FlatShard):
            pieces = _pieces_of_run(shard, columns)
        elif layout.are_experts:
            pieces = _pieces_of_experts(shard)
        else:
            pieces = _pieces_of_box(shard, layout.groups)
        for row, column, magnitudes, matrix in pieces:
            of_rows.index_add_(0, row, magnitudes.sum(1))
            if matrix is not None:
                of_columns[matrix * columns + column] += magnitudes.sum(0)
            else:
                place = row // rows_of_matrix * columns
                places = place.unsqueeze(1) + column.view(-1, magnitudes.shape[1])
                of_columns.index_add_(0, places.view(-1), magnitudes.reshape(-1))
    if layout.is_transposed:
        of_rows, of_columns = of_columns, of_rows
    return torch.cat([of_columns, of_rows]).cpu()


# Rows and columns of the weight as a matrix, fp64 |w| [rows, columns], and the number of the group
# or expert that all of them belong to. The matrix is [shape[0], the rest], or all experts one below
# the other, [shape[0] * shape[1], shape[2]]. Without the number, rows may belong to several, and
# the columns are those of all rows or, if there is one column to a row, one for each.
Piece = tuple[Tensor, Tensor, Tensor, int | None]


def _pieces_of_experts(shard: LocalShard) -> Iterator[Piece]:
    """Chunks of rows of fused experts, of a part that is a box of the whole weight."""
    first, *rest = shard.coordinates
    for number, expert in enumerate(first):
        mask = None if shard.mask is None else shard.mask[number]
        matrix, of_rows = shard.values[number], expert * shard.shape[1]
        yield from _pieces(matrix, mask, rest, shard.shape[1:], of_rows, expert)


def _pieces_of_box(shard: LocalShard, groups: int) -> Iterator[Piece]:
    """Chunks of rows of a part that is a box of the whole weight."""
    group = 0 if groups == 1 else None
    return _pieces(shard.values, shard.mask, shard.coordinates, shard.shape, 0, group)


def _pieces(
    values: Tensor,
    mask: Tensor | None,
    coordinates: Sequence[range],
    shape: Sequence[int],
    offset: int,
    number: int | None,
) -> Iterator[Piece]:
    """Chunks of rows of a box of a weight of some shape; ``offset`` is added to the rows."""
    device = values.device
    first, *rest = coordinates
    columns = torch.arange(math.prod(shape[1:]), device=device).view(tuple(shape[1:]))
    for dim, within in enumerate(rest):
        columns = columns.narrow(dim, within.start, len(within))
    columns = columns.reshape(-1)
    step = max(1, _CHUNK // max(1, columns.numel()))
    for start in range(0, len(first), step):
        size = min(step, len(first) - start)
        magnitudes = values.narrow(0, start, size).double().abs()
        if mask is not None:
            magnitudes *= mask.narrow(0, start, size) == 1
        begin = offset + first.start + start
        row = torch.arange(begin, begin + size, device=device)
        yield row, columns, magnitudes.reshape(size, -1), number


def _pieces_of_run(shard: LocalShard, num_columns: int) -> Iterator[Piece]:
    """Chunks of elements of a part that is a run in memory (FSDP1): a row to each element."""
    for start in range(0, shard.values.numel(), _CHUNK):
        stop = min(start + _CHUNK, shard.values.numel())
        index = shard.index(torch.arange(start, stop, device=shard.values.device))
        magnitudes = shard.values[start:stop].double().abs()
        if shard.mask is not None:
            magnitudes *= shard.mask[start:stop] == 1
        yield index // num_columns, index % num_columns, magnitudes.unsqueeze(1), None


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

    Cost: three reads of the weights; all-reduces of 8, 16 and 8 bytes per parameter. The mean is
    exact to 2**-36 of the largest score, and does not depend on the sharding: exact_sums.
    """
    parts = [_scored(target, scores[target.label]) for target in targets]
    blocks = [block_of(target.label) for target in targets]
    largest = largest_scores(parts, "an outlier ratio", communicator)
    for target, value in zip(targets, largest, strict=True):
        if math.isnan(value):
            raise ValueError(f"{target.label}: a score is NaN; expected finite weights.")
    # One grid for all parameters of a block, so that their sums add up.
    top = dict.fromkeys(blocks, 0.0)
    for name, value in zip(blocks, largest, strict=True):
        top[name] = max(top[name], value)
    exponent_of = {name: exact_sums.exponent_of(value) for name, value in top.items()}
    exponents = [exponent_of[name] if top[name] > 0 else None for name in blocks]
    totals, sizes = dict.fromkeys(blocks, 0), dict.fromkeys(blocks, 0)
    for name, total, size in zip(
        blocks, grid_sums(parts, exponents, 1, communicator), num_live, strict=True
    ):
        totals[name] += total
        sizes[name] += size
    means = {
        name: exact_sums.statistic("mean", totals[name], exponent_of[name], sizes[name])
        for name in top
    }
    thresholds = [multiple * means[name] for name in blocks]

    def count() -> Tensor:
        measures = [partial(_count_above, threshold) for threshold in thresholds]
        return torch.tensor([sum(chunks) for chunks in per_chunk(parts, measures)])

    counts = dict.fromkeys(blocks, 0)
    for name, number in zip(blocks, communicator.reduce(len(parts), count).tolist(), strict=True):
        counts[name] += number
    return {
        target.label: counts[name] / max(1, sizes[name])
        for target, name in zip(targets, blocks, strict=True)
    }


def _scored(target: Target, scores: FactoredScores) -> Scored:
    shard = target.shard
    source: ScoreSource
    if target.places:
        source = FactorScores.of_shard(shard, scores, are_signed=True)
    else:  # of other ranks: no element of it is here
        source = TensorScores(shard.values)
    return Scored(
        target.label,
        source,
        None if shard.mask is None else shard.flat(shard.mask),
        shard.counted,
        shard.values.device,
    )


def _count_above(threshold: float, part: Scored, span: range, scratch: Scratch) -> Count:
    """Live scores above a number of float64."""
    scores = part.scores.load(span.start, span.stop, scratch)
    if not memory.takes_numpy(part.device):
        above = scores.double() > threshold
        live = live_flags(part, span)
        return (above if live is None else above & live).sum()
    wide = widened(scores, scratch, part.dtype)
    limit = wide.dtype.type(threshold)
    if limit > threshold:  # rounded up: what lies above the next number below lies above the limit
        limit = np.nextafter(limit, wide.dtype.type(0))
    above = np.greater(wide, limit, out=scratch.array("above", wide.size, bool))
    if part.live is not None:
        above &= live_array(part.live, span, scratch)
    return int(np.count_nonzero(above))
