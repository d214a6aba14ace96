"""Sums of the squares of gradients, by output and by input, while hooks see the gradients.

[Note: blocks of gradients] Which block of a whole parameter the gradient on a rank is of, and which
ranks count::

                            the gradient on a rank              ranks that run the same batches
    plain, DDP, FSDP, HSDP  of the whole parameter              none
    TP                      of this rank's part                 those of the mesh
    FSDP2 over TP           of the part of a tensor-parallel    those along the tensor-parallel axes
                            rank, gathered over data ranks
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from distprune.files.checkpoints.statistics_file import StoredGradients
from distprune.ranks.collectives import Communicator
from distprune.shards.geometry import dim_coordinates
from distprune.shards.gradients import unaveraged_gradients
from distprune.shards.parameters import Target
from distprune.shards.rank_batches import RankBatches
from distprune.shards.shard import LocalShard
from distprune.statistics.input_parts import peers_of, ranks_at, spans
from distprune.statistics.layers import WeightLayout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.placement_types import Placement

# Ranks that run the same batches have the same weights, which are added in another order.
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class GradientTotals:
    """The statistics of one parameter's gradients over all ranks; equal on all of them.

    Attributes:
        weight: the sum of the weights of all batches.
        by_output: fp64 [outputs]: the sum of weight * g**2 over each row and all batches. Outputs
            of fused experts follow each other, expert by expert.
        by_input: fp64, of the input shape: the same over each column.
    """

    weight: float
    by_output: Tensor
    by_input: Tensor

    def plus(self, other: GradientTotals) -> GradientTotals:
        """The statistics of all batches of both."""
        by_output, by_input = self.by_output + other.by_output, self.by_input + other.by_input
        return GradientTotals(self.weight + other.weight, by_output, by_input)

    def as_stored(self, layout: WeightLayout) -> StoredGradients:
        """What a file has of the parameter."""
        both = self.by_output.numpy(), self.by_input.numpy()
        return StoredGradients(layout, self.weight, *both)

    @classmethod
    def none_of(cls, layout: WeightLayout) -> GradientTotals:
        """Those of no batch."""
        by_output, by_input = (
            torch.zeros(shape, dtype=torch.float64)
            for shape in (layout.num_outputs, layout.input_shape)
        )
        return cls(0.0, by_output, by_input)


class GradientSums(RankBatches):
    """Sums of weight * g**2 over the rows and the columns of parameters, for batches of this rank.

    Args:
        targets: the parameters.
        layouts: how they lie, by label.
        data_ranks: the data-parallel ranks of those that FSDP does not shard; see
            ``unaveraged_gradients``.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        layouts: Mapping[str, WeightLayout],
        data_ranks: ProcessGroup | None,
    ) -> None:
        shards = [target.shard for target in targets]
        leaves = unaveraged_gradients(shards, data_ranks)
        super().__init__(leaves, [target.label for target in targets], 2)
        blocks = {
            position: gradient_block(shards[position], leaf.data_groups)
            for leaf in leaves
            for position in leaf.runs
        }
        self._parameters = [
            _LocalSums(target, layouts[target.label], blocks[position])
            for position, target in enumerate(targets)
        ]

    def finish(self, communicator: Communicator) -> dict[str, GradientTotals]:
        """What all ranks have added up, by label. Collective.

        Raises:
            RuntimeError: what went wrong in a batch, on any rank.
            ValueError: a sum that is not finite; ranks of a tensor-parallel group that ran batches
                of other weights. On every rank.

        Cost: one all-reduce of 8 bytes per output and per input, and 16 per parameter.
        """
        sizes = [2 + p.layout.num_outputs + p.layout.num_inputs for p in self._parameters]
        rank = communicator.rank

        def check() -> None:
            if self.problem is not None:
                raise self.problem

        def pack() -> Tensor:
            known = {p.block.batch_ranks for p in self._parameters if p.block.batch_ranks}
            peers = peers_of(known, rank)
            return torch.cat([p.packed(peers, rank, self.weight) for p in self._parameters])

        communicator.run(check)
        rows = torch.split(communicator.reduce_floats(sum(sizes), pack), sizes)
        found = {}
        for parameter, row in zip(self._parameters, rows, strict=True):
            label, layout = parameter.target.label, parameter.layout
            weight, check_of_weights = row[:2].tolist()
            if not bool(row.isfinite().all()):
                raise ValueError(
                    f"{label}: the sum of its squared gradients is not finite; expected finite "
                    "gradients. Under fp16 a smaller loss scale avoids an overflow; nothing is "
                    "updated, so a fixed scale will do."
                )
            if abs(check_of_weights) > _TOLERANCE * weight:
                raise ValueError(
                    f"{label}: ranks of one tensor-parallel group ran batches of different "
                    "weights; expected the same batches on all of them: split the data by the "
                    "data-parallel rank, not by the global rank."
                )
            by_output, by_input = torch.split(row[2:], [layout.num_outputs, layout.num_inputs])
            by_input = by_input.reshape(layout.input_shape)
            found[label] = GradientTotals(weight, by_output.clone(), by_input.clone())
        return found

    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        if factor:
            for position in self._gradients[number].runs:
                self._parameters[position].add(gradient, factor)


class _LocalSums:
    """What this rank has seen of the gradients of one parameter."""

    def __init__(self, target: Target, layout: WeightLayout, block: GradientBlock) -> None:
        self.target = target
        self.layout = layout
        self.block = block
        self._matrices = matrix_ranges(target.label, layout, block.coordinates)
        self._sums: tuple[Tensor, Tensor] | None = None  # by output, and by input, of the whole

    def add(self, gradient: Tensor, factor: float) -> None:
        """Add factor * g**2 of a gradient, as the leaf of the parameter brings it."""
        managed, layout = self.target.shard.managed, self.layout
        if managed is not None:
            gradient = managed.of_leaf(gradient)
        expected = tuple(map(len, self.block.coordinates))
        if tuple(gradient.shape) != expected:
            raise NotImplementedError(
                f"{self.target.label}: a gradient of shape {tuple(gradient.shape)}; expected "
                f"{expected}, as torch.chunk cuts a parameter of shape {layout.shape}."
            )
        if self._sums is None:
            self._sums = tuple(
                torch.zeros(layout.num_matrices, size, dtype=torch.float64, device=gradient.device)
                for size in layout.matrix_shape
            )  # type: ignore[assignment]
        assert self._sums is not None
        counts, *both = self._matrices
        matrices = gradient.reshape(len(counts), *map(len, both))
        sums = squares_along(matrices)
        if layout.is_transposed:
            both, sums = both[::-1], sums[::-1]
        for total, where, of_block in zip(self._sums, both, sums, strict=True):
            part = total[counts.start : counts.stop, where.start : where.stop]
            part.add_(of_block, alpha=factor)

    def packed(self, peers: tuple[int, ...], rank: int, weight: float) -> Tensor:
        """What this rank adds: the weight, what compares it among ranks, and the sums.

        Args:
            peers: ranks that run the same batches, for a parameter that does not tell.
            rank: this one.
            weight: of the batches of this rank.
        """
        layout, block = self.layout, self.block
        batch_ranks = peers if block.batch_ranks is None else block.batch_ranks
        ranks = peers if block.ranks is None else block.ranks
        head = torch.zeros(2, dtype=torch.float64)
        sums = torch.zeros(layout.num_outputs + layout.num_inputs, dtype=torch.float64)
        if rank in batch_ranks:
            is_first = rank == batch_ranks[0]
            # The first of n ranks adds (n - 1) times what each of the others takes away.
            of_peers = (len(batch_ranks) - 1) * weight if is_first else -weight
            head = torch.tensor([weight * is_first, of_peers], dtype=torch.float64)
        if self._sums is not None and rank == ranks[0]:
            sums = torch.cat([total.view(-1).cpu() for total in self._sums])
        return torch.cat([head, sums])


def matrix_ranges(
    label: str, layout: WeightLayout, coordinates: Sequence[range]
) -> tuple[range, range, range]:
    """The matrices, and the first and second dimension in them, of a block of a parameter.

    Raises:
        NotImplementedError: a block that is no rectangle of matrices.
    """
    if layout.are_experts:
        matrices, first, second = coordinates
        return matrices, first, second
    first, second = coordinates[:2]
    size = math.prod(layout.shape[2:])
    is_whole = [len(rows) == size for rows, size in zip(coordinates, layout.shape, strict=True)]
    if not all(is_whole[2:]) or (layout.groups > 1 and not all(is_whole)):
        raise NotImplementedError(
            f"{label}: a convolution with {layout.groups} group(s) whose gradient is sharded over "
            "dimensions of its kernel, or over its groups; expected one that is whole on every "
            "rank, or sharded by outputs or by inputs. Leave it out."
        )
    if layout.groups == 1:
        return range(1), first, range(second.start * size, second.stop * size)
    outputs = range(layout.shape[0] // layout.groups)
    return range(layout.groups), outputs, range(len(second) * size)


def squares_along(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the squares of matrices over their second, and over their first dimension.

    Args:
        matrices: [matrices, first, second], of any real floating-point dtype.

    Returns:
        fp64 [matrices, first] and [matrices, second]. Squares are those of fp64.

    Cost: one read; temporaries in fp64 of a chunk, 1 MiB on a CPU and 32 MiB elsewhere.
    """
    count, height, width = matrices.shape
    device = matrices.device
    over_second = torch.zeros(count, height, dtype=torch.float64, device=device)
    over_first = torch.zeros(count, width, dtype=torch.float64, device=device)
    for first, last in spans(count, height * width, device):
        for start, stop in spans(height, width * (last - first), device):
            chunk = matrices[first:last, start:stop].to(torch.float64, copy=True).square_()
            over_second[first:last, start:stop] = chunk.sum(2)
            over_first[first:last] += chunk.sum(1)
    return over_second, over_first


@dataclass(frozen=True)
class GradientBlock:
    """What the gradient of a parameter on this rank is of.

    Attributes:
        coordinates: a range per dimension of the whole parameter.
        batch_ranks: ranks that run the same batches as this one; None: the parameter does not tell.
        ranks: those of them whose gradients are of the same elements.
    """

    coordinates: tuple[range, ...]
    batch_ranks: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None


def gradient_block(shard: LocalShard, data_groups: Sequence[ProcessGroup]) -> GradientBlock:
    """The block of a parameter.

    Args:
        shard: this rank's part of the parameter.
        data_groups: the ranks that run other batches on it: see ``LocalGradients``.
    """
    mesh = shard.mesh
    coordinate = None if mesh is None else mesh.get_coordinate()
    if mesh is None:
        return GradientBlock(dim_coordinates(shard.shape, ()))
    if coordinate is None:  # outside of the mesh: no gradient comes, and no batch counts
        return GradientBlock(tuple(range(0) for _ in shard.shape), (), ())
    from torch.distributed.tensor import Replicate

    from distprune.shards.dtensor import splits_of

    assert shard.placements is not None
    data_ranks = [set(dist.get_process_group_ranks(group)) for group in data_groups]
    placements: list[Placement] = []
    same_batches: list[slice | int] = list(coordinate)
    same_elements: list[slice | int] = list(coordinate)
    for axis, placement in enumerate(shard.placements):
        along: list[slice | int] = list(coordinate)
        along[axis] = slice(None)
        members = set(ranks_at(mesh, along))
        if len(members) == 1 or any(members <= ranks for ranks in data_ranks):
            placements.append(Replicate())  # gathered, or replicas with other batches
            continue
        placements.append(placement)
        same_batches[axis] = slice(None)
        if isinstance(placement, Replicate):
            same_elements[axis] = slice(None)
    if not any(isinstance(where, slice) for where in same_batches):
        return GradientBlock(dim_coordinates(shard.shape, ()))
    splits = splits_of(shard.name, len(shard.shape), tuple(mesh.shape), coordinate, placements)
    if any(split.num_groups > 1 for split in splits or ()):
        raise NotImplementedError(
            f"{shard.name}: the ranks have parts of groups of rows ({shard.layout}); expected "
            "whole dimensions. Of such a parameter, criteria take gradients element by element."
        )
    batch_ranks, ranks = ranks_at(mesh, same_batches), ranks_at(mesh, same_elements)
    return GradientBlock(dim_coordinates(shard.shape, splits or ()), batch_ranks, ranks)
