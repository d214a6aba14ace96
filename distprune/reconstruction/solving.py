"""Least squares for the rows of one matrix, and where a rank's elements are in such rows.

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

[Note: blocks] A weight is one matrix or several, one below the other: an expert, a group of a
convolution. A row has the elements of one output. A rank has blocks of a matrix, which are views of
its part:

    FSDP2, Shard(0), or a replica      FSDP1, a run of memory          Shard(1), TP row-wise
    . . . . . .                        . . . . x x  a block            x x . . . .
    x x x x x x   one block            x x x x x x  a block            x x . . . .   one block
    x x x x x x                        x x x . . .  a block            x x . . . .
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distprune.shards.shard import Shard
from distprune.statistics.layers import WeightLayout

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


@dataclass(frozen=True)
class Block:
    """What a rank has of one matrix; see [Note: blocks].

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


def blocks_of(shard: Shard, layout: WeightLayout) -> list[Block]:
    """This rank's blocks of a weight.

    Raises:
        NotImplementedError: FSDP1's run of a weight that is not row-major in memory; a convolution
            that is cut along its kernel.
    """
    if not shard.values.numel():
        return []
    if shard.is_run:
        return list(_blocks_of_run(shard, layout))
    if shard.index.fold is not None:
        raise NotImplementedError(
            f"{shard.name}: the ranks have parts of groups of rows ({shard.layout}); expected a "
            "weight that is cut in whole dimensions. For fused experts, use ep_size beside tp_size."
        )
    return list(_blocks_of_region(shard, layout))


def _blocks_of_region(shard: Shard, layout: WeightLayout) -> Iterator[Block]:
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


def _blocks_of_run(shard: Shard, layout: WeightLayout) -> Iterator[Block]:
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
