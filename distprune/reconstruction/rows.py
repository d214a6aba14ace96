"""Where a rank's elements of a weight are in the rows of its matrices.

A weight is one matrix or several, one below the other: an expert, a group of a convolution. A row
has the elements of one output. A rank has blocks of a matrix, which are views of its part:

    FSDP2, Shard(0), or a replica      FSDP1, a run of memory          Shard(1), TP row-wise
    . . . . . .                        . . . . x x  a block            x x . . . .
    x x x x x x   one block            x x x x x x  a block            x x . . . .   one block
    x x x x x x                        x x x . . .  a block            x x . . . .
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distprune.shards.shard import FlatShard, FoldedShard, LocalShard
from distprune.statistics.layers import WeightLayout


@dataclass(frozen=True)
class Block:
    """What a rank has of one matrix.

    Attributes:
        matrix: its number.
        rows, columns: where the block is in the matrix.
        view: from a local tensor, laid out like the rank's part of the weight, to a view of the
            block: [rows, ...].
    """

    matrix: int
    rows: range
    columns: range
    view: Callable[[Tensor], Tensor]

    def read(self, local: Tensor, rows: range) -> Tensor:
        """Some of its rows, [rows, columns]."""
        return self._piece(local, rows).flatten(1)

    def write(self, local: Tensor, rows: range, values: Tensor) -> None:
        """Write some of its rows."""
        piece = self._piece(local, rows)
        piece.copy_(values.view(piece.shape))

    def _piece(self, local: Tensor, rows: range) -> Tensor:
        return self.view(local).narrow(0, rows.start - self.rows.start, len(rows))


def blocks_of(shard: LocalShard, layout: WeightLayout) -> list[Block]:
    """This rank's blocks of a weight.

    Raises:
        NotImplementedError: FSDP1's run of a weight that is not row-major in memory; a convolution
            that is cut along its kernel.
    """
    if not shard.values.numel():
        return []
    if isinstance(shard, FlatShard):
        return list(_blocks_of_run(shard, layout))
    if isinstance(shard, FoldedShard):
        raise NotImplementedError(
            f"{shard.name}: the ranks have parts of groups of rows ({shard.layout}); expected a "
            "weight that is cut in whole dimensions. For fused experts, use ep_size beside tp_size."
        )
    return list(_blocks_of_region(shard, layout))


def _blocks_of_region(shard: LocalShard, layout: WeightLayout) -> Iterator[Block]:
    """Of a range in each dimension."""
    where, (height, _) = shard.coordinates, layout.matrix_shape
    if layout.are_experts:
        rows, columns = where[layout.output_dim], where[layout.input_dim]
        for place, expert in enumerate(where[0]):

            def of_expert(local: Tensor, place: int = place) -> Tensor:
                return local[place].mT if layout.is_transposed else local[place]

            yield Block(expert, rows, columns, of_expert)
        return
    if layout.is_transposed:
        yield Block(0, where[1], where[0], lambda local: local.mT)
        return
    inner = torch.Size(layout.shape[2:]).numel()
    if any(len(have) != whole for have, whole in zip(where[2:], layout.shape[2:], strict=True)):
        raise NotImplementedError(
            f"{shard.name}: a convolution that is sharded along its kernel; expected shards along "
            "its outputs or its channels."
        )
    columns = range(where[1].start * inner, where[1].stop * inner)
    for matrix in range(layout.num_matrices):
        start = max(where[0].start, matrix * height)
        stop = min(where[0].stop, (matrix + 1) * height)
        if start < stop:
            here = slice(start - where[0].start, stop - where[0].start)

            def of_group(local: Tensor, here: slice = here) -> Tensor:
                return local[here]

            first = matrix * height
            yield Block(matrix, range(start - first, stop - first), columns, of_group)


def _blocks_of_run(shard: FlatShard, layout: WeightLayout) -> Iterator[Block]:
    """Of a run of row-major memory: a part of a line, whole lines, a part of a line."""
    begin, (height, width) = shard.index.start, layout.matrix_shape
    if begin is None:
        raise NotImplementedError(
            f"{shard.name}: FSDP1 has flattened a weight that is not row-major in memory "
            "(channels_last, say), so that its rows are not runs. Make it contiguous before the "
            "model is wrapped, or use fully_shard."
        )
    length = height if layout.is_transposed else width  # of a line in memory
    num_lines = width if layout.is_transposed else height
    end = begin + shard.values.numel()
    position = begin
    while position < end:
        line, offset = divmod(position, length)
        matrix, line = divmod(line, num_lines)
        if offset or end - position < length:
            stop = min(end, position - offset + length)
            lines, within = range(line, line + 1), range(offset, offset + stop - position)
        else:
            num = min((end - position) // length, num_lines - line)
            stop = position + num * length
            lines, within = range(line, line + num), range(length)

        here = slice(position - begin, stop - begin)

        def of_lines(local: Tensor, here: slice = here, num: int = len(lines)) -> Tensor:
            found = local[here].view(num, -1)
            return found.mT if layout.is_transposed else found

        rows, columns = (within, lines) if layout.is_transposed else (lines, within)
        yield Block(matrix, rows, columns, of_lines)
        position = stop
