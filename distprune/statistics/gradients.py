"""GradientStatistics: sums of squared gradients by output and by input, and Fisher by factors.

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
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distprune.base.naming import NamedParameter, checked_pair, label_of
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.statistics_file import (
    StoredGradients,
    read_gradient_statistics,
)
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.shards import factored
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import dim_coordinates
from distprune.shards.gradients import (
    CollectsRankBatches,
    RankBatches,
    check_trainable,
    ranks_with_shards,
    unaveraged_gradients,
)
from distprune.shards.reader import ShardReader
from distprune.shards.shard import Shard
from distprune.statistics.input_parts import ranks_at, spans
from distprune.statistics.layers import WeightLayout, matrices_of
from distprune.statistics.parameters import (
    OfParameter,
    Pairs,
    Statistics,
    Sums,
    difference_of,
    peers_of,
)
from distprune.wrappers.held import find_held

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor.placement_types import Placement


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


class GradientSums(RankBatches):
    """Sums of weight * g**2 over the rows and the columns of parameters, for batches of this rank.

    Args:
        parameters: whose gradients are added up.
        shards: this rank's part of each.
        data_ranks: the data-parallel ranks of those that FSDP does not shard; see
            ``unaveraged_gradients``.
    """

    def __init__(
        self,
        parameters: Sequence[OfParameter],
        shards: Sequence[Shard],
        data_ranks: ProcessGroup | None,
    ) -> None:
        leaves = unaveraged_gradients(shards, data_ranks)
        super().__init__(leaves, [parameter.label for parameter in parameters], 2)
        self._parameters, self._shards = parameters, shards
        blocks = {
            position: gradient_block(shards[position], leaf.data_groups)
            for leaf in leaves
            for position in leaf.runs
        }
        self._blocks = [blocks[position] for position in range(len(shards))]
        self._matrices = [
            matrix_ranges(parameter.label, parameter.layout, block.coordinates)
            for parameter, block in zip(parameters, self._blocks, strict=True)
        ]
        # By position, sums by output and by input, of the whole parameter.
        self._sums: dict[int, list[Tensor]] = {}

    def packed(self, rank: int) -> list[Tensor]:
        """What this rank adds of each parameter, as ``Statistics`` sums it up.

        Raises:
            RuntimeError: what went wrong in a batch.
        """
        if self.problem is not None:
            raise self.problem
        known = {block.batch_ranks for block in self._blocks if block.batch_ranks}
        peers = peers_of(known, rank)
        return [self._packed(number, peers, rank) for number in range(len(self._parameters))]

    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        for position in self._gradients[number].runs if factor else ():
            managed = self._shards[position].managed
            own = gradient if managed is None else managed.of_leaf(gradient)
            self._add_gradient(position, own, factor)

    def _add_gradient(self, position: int, gradient: Tensor, factor: float) -> None:
        """Add factor * g**2 of a gradient."""
        layout = self._parameters[position].layout
        expected = tuple(map(len, self._blocks[position].coordinates))
        if tuple(gradient.shape) != expected:
            raise NotImplementedError(
                f"{self._labels[position]}: a gradient of shape {tuple(gradient.shape)}; expected "
                f"{expected}, as torch.chunk cuts a parameter of shape {layout.shape}."
            )
        if position not in self._sums:
            self._sums[position] = [
                torch.zeros(layout.num_matrices, size, dtype=torch.float64, device=gradient.device)
                for size in layout.matrix_shape
            ]
        counts, *both = self._matrices[position]
        sums = squares_along(gradient.reshape(len(counts), *map(len, both)))
        if layout.is_transposed:
            both, sums = both[::-1], sums[::-1]
        for total, where, of_block in zip(self._sums[position], both, sums, strict=True):
            part = total[counts.start : counts.stop, where.start : where.stop]
            part.add_(of_block, alpha=factor)

    def _packed(self, position: int, peers: tuple[int, ...], rank: int) -> Tensor:
        """What this rank adds: the weight, what compares it among ranks, and the sums.

        Args:
            position: of the parameter.
            peers: ranks that run the same batches, for a parameter that does not tell.
            rank: this one.
        """
        layout, block = self._parameters[position].layout, self._blocks[position]
        batch_ranks = peers if block.batch_ranks is None else block.batch_ranks
        ranks = peers if block.ranks is None else block.ranks
        packed = torch.zeros(3 + layout.num_outputs + layout.num_inputs, dtype=torch.float64)
        if rank in batch_ranks:
            packed[0] = difference_of(self.weight, batch_ranks, rank)
            packed[2] = self.weight * (rank == batch_ranks[0])
        if position in self._sums and rank == ranks[0]:
            packed[3:] = torch.cat([total.view(-1).cpu() for total in self._sums[position]])
        return packed


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


def gradient_block(shard: Shard, data_groups: Sequence[ProcessGroup]) -> GradientBlock:
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
    splits = splits_of(shard.name, shard.shape, tuple(mesh.shape), coordinate, placements)
    if any(split.num_groups > 1 for split in splits):
        raise NotImplementedError(
            f"{shard.name}: the ranks have parts of groups of rows ({shard.layout}); expected "
            "whole dimensions. Of such a parameter, criteria take gradients element by element."
        )
    batch_ranks, ranks = ranks_at(mesh, same_batches), ranks_at(mesh, same_elements)
    return GradientBlock(dim_coordinates(shard.shape, splits), batch_ranks, ranks)


class GradientStatistics(Statistics[OfParameter], CollectsRankBatches):
    """Sums of squared gradients by output and by input, from which Fisher by factors is made.

    statistics = GradientStatistics(prune.select(model))
    with statistics.calibrating():             # on all ranks, also on those without data
        for batch in calibration:
            with statistics.batch(weight=num_tokens):
                loss(model, batch).backward()  # exactly one
    prune.global_unstructured(..., importance_scores=statistics.fisher())

    For each row and each column of each matrix: the sum of ``weight * g**2`` over its elements and
    over the batches of all data-parallel ranks, in fp64, where g is the gradient of one batch of
    one rank, before anything is averaged; and the sum of the weights. So a unit is what
    ``criteria.Fisher(unit="rank_batch")`` has. One process that ran all batches one after the other
    would have the same sums, up to the rounding of fp64; if the gradients and weights are integers,
    the same bits. Batches of tensor-parallel ranks, which are the same, count once.

    Parameters: any of two or more dimensions. Rows are outputs and columns are inputs, of the
    matrices that ``ActivationStatistics`` knows: of linear layers and transformers' Conv1D; of each
    group of a convolution, with a column for each element of the unfolded input; of each of fused
    experts. Of other parameters, such as embeddings, dimension 0 counts rows; of three dimensions,
    matrices. A tied parameter counts once, with the sum of the gradients of all its uses.

    Collect before the first pruning. What is pruned has no gradient, so that rows and columns that
    have lost much would seem to matter little. The scores are of the weights at the moment when
    they are ranked: those of the dense model's sums serve all rounds of ``prune_in_rounds``.

    A calibration that ends with an error changes nothing.

    Making the object, ``calibrating`` when it begins and when it ends, and everything that asks
    for statistics is collective: all ranks do it, in the same order. ``batch`` communicates
    nothing.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them. Wrap the model first.
        group: the ranks that take part; every rank by default. Also the data-parallel ranks of
            parameters that FSDP does not shard: see ``criteria.GradientMoment``.

    Raises:
        TypeError: no (module, name) pairs.
        ValueError: no parameters, or ranks with different ones.
        NotImplementedError: a parameter of fewer than two dimensions, or of a layout or wrapper
            that is not supported. On every rank.

    Cost: 16 bytes of memory for each output and each input on every rank, and 8 on the wire when a
    calibration ends: nothing of the size of a weight is stored or sent. A backward reads each
    gradient once more, in fp64, chunk by chunk.
    """

    _mode = "gradients"
    _KIND = StoredGradients
    _NOT_FINITE = (
        "the sum of its squared gradients is not finite; expected finite gradients. Under fp16 a "
        "smaller loss scale avoids an overflow; nothing is updated, so a fixed scale will do."
    )
    _UNEQUAL = (
        "ranks of one tensor-parallel group ran batches of different weights; expected the same "
        "batches on all of them: split the data by the data-parallel rank, not by the global rank."
    )

    def __init__(self, parameters: Pairs, *, group: ProcessGroup | None = None) -> None:
        self._group = group
        pairs: list[tuple[nn.Module, str]] = []

        def arguments() -> ParameterArguments:
            return ParameterArguments(parameters=pairs or list(parameters))

        communicator = world(group)
        if group is not None:
            # Ranks that have other parts of the same parameters take part too.
            communicator = communicator.run(lambda: _with_shards(pairs, parameters, group))
        super().__init__(communicator, arguments, _matrices_of, OfParameter)
        for parameter in self._local:  # the ranks have seen nothing, and add up when they have
            shapes = self._shapes(parameter.layout)
            none = Sums(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))
            parameter.set_total(none, None)

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Collect batches inside, by hooks, which are gone afterwards; it may be entered again.

        Collective when it begins and when it ends: every rank enters it, also one that has no
        batch. (FSDP needs all ranks in every backward; a rank without data joins with any batch and
        ``weight=0``.) An error of one rank is raised on the others when they leave the context.

        Raises:
            RuntimeError: calibrating already; at the end, on every rank, a batch of any rank that
                had no backward, or several, or a backward outside of ``batch``.
            ValueError: at the end, on every rank, a sum that is not finite; tensor-parallel ranks
                with batches of different weights. At the beginning, a parameter that is frozen, or
                whose data-parallel ranks are not known.
            NotImplementedError: a parameter that is pruned under FSDP, which shows the gradients
                of pruned elements as well.

        Cost: on the wire, when it ends, 8 bytes per output and per input, once; in a backward
        nothing. See the class for memory.
        """
        communicator = self._communicator

        def attach() -> None:
            targets = self._targets()
            communicator.run(lambda: self._attach(targets))

        def finish() -> None:
            packed = communicator.run(lambda: self._sums.packed(communicator.rank))
            found = self._sum_over_ranks(self._local, lambda: packed)
            for parameter, new in zip(self._local, found, strict=True):
                parameter.set_total(new, parameter.total)

        with self._calibrating(communicator, attach, finish):
            yield

    @contextmanager
    def batch(self, weight: float = 1.0, *, loss_scale: float = 1.0) -> Iterator[None]:
        """One unit: a micro-batch of this rank, with exactly one backward inside.

        ``.grad`` is neither read nor changed, so it does not matter when it is zeroed, and whether
        the wrapper synchronises (``no_sync``).

        Args:
            weight: how much the unit counts, such as its number of tokens; ranks may differ.
            loss_scale: the factor that the loss was multiplied with (``scaler.get_scale()``, or
                1/A where the loss of A micro-batches is divided by A); gradients are divided by it.

        Raises:
            ValueError: a weight or a loss scale out of range.
            RuntimeError: outside of ``calibrating``. What may go wrong on one rank alone is raised
                on all of them, when ``calibrating`` ends.
            NotImplementedError: in the backward, gradients whose layout is not known.
        """
        with self._rank_batch(weight, loss_scale, self._communicator.size):
            yield

    def totals(self, parameters: Pairs | None = None) -> dict[NamedParameter, GradientTotals]:
        """The sums over all ranks, bit-equal on all of them. Collective.

        Args:
            parameters: some of the parameters, the same on all ranks; by default all.

        Raises:
            ValueError: a parameter that these statistics do not have.
            RuntimeError: inside of ``calibrating``.

        Cost: an all-reduce of 40 bytes.
        """
        return self._by_pair(
            self._asked(parameters), lambda p: GradientTotals(self._count(p), *p.sums[1:])
        )

    def fisher(self, parameters: Pairs | None = None) -> dict[NamedParameter, FactoredScores]:
        """Scores of the Fisher information by factors: |w_ij| * sqrt(r_i * c_j / T). Collective.

        r_i and c_j are the sums of the mean of g**2 over row i and over column j of a matrix, and T
        is the sum of all of it. ``r_i * c_j / T`` is the matrix of rank one with these sums, by
        which Adafactor replaces the second moment of each element. So the scores are the root
        of ``w**2 * r_i * c_j / T``, Fisher's ``w**2 * E[g**2]`` with that matrix for ``E[g**2]``:
        a root changes no order, within a parameter or between parameters. Where T is 0, all
        scores are 0, and a warning names the parameter.

        Args:
            parameters: some of the parameters, the same on all ranks; by default all.

        Returns:
            By (module, name): what ``importance_scores`` takes. Scores are computed while they
            are ranked and never stored; in memory are 4 bytes for each output and each input (per
            element for a convolution with groups).

        Raises: as :meth:`totals`; ValueError, there was no batch, or all weights were 0.

        Cost: an all-reduce of 40 bytes.

        Source: Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost",
        arXiv 1804.04235, section 3, for the factors; ``criteria.Fisher`` for the score.
        """
        asked = self._asked(parameters)
        for parameter in asked:
            if not self._count(parameter):
                raise ValueError(
                    f"{parameter.label}: the weights of all its batches are 0, or there was none; "
                    "expected a batch with a positive one inside of calibrating()."
                )
        has_gradients = [
            (p, p.sums.second.reshape(p.layout.num_matrices, -1).any(1).tolist()) for p in asked
        ]
        self._warn_of_zeros("all gradients are zero of", has_gradients, "data", stacklevel=3)
        return self._by_pair(
            asked, lambda p: factored.fisher(p.layout, *p.sums[1:], self._count(p))
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], parameters: Pairs, *, group: ProcessGroup | None = None
    ) -> GradientStatistics:
        """Statistics of a file that :meth:`save` wrote, for any sharding. Collective.

        Args:
            path: of the file; every rank reads it.
            parameters, group: as for the class. The file may have statistics of more parameters.

        Raises:
            CheckpointError: of distprune.files.errors, no such file, or a malformed one.
            ValueError: a parameter that the file does not have, or that has another shape; ranks
                that read different files.
            NotImplementedError: as the class.

        Cost: a read of the file; all-reduces of some hundred bytes.
        """
        made = cls(parameters, group=group)
        made._load(os.fspath(path), lambda where: ("gradients", read_gradient_statistics(where)))
        return made

    def _count(self, parameter: OfParameter) -> float:
        return float(parameter.sums.counts)

    def _shapes(self, layout: WeightLayout) -> tuple[tuple[int, ...], ...]:
        return (1,), (layout.num_outputs,), layout.input_shape

    def _check_ready(self) -> None:
        self._check_between()

    def _attach(self, targets: list[Shard]) -> None:
        """Put hooks on."""
        for target in targets:
            check_trainable(target)
            (module, name), *_ = target.places
            if find_held(module, name) is not None:
                raise NotImplementedError(
                    f"{target.name} is pruned and sharded, where the gradients of pruned elements "
                    "are seen too, which would count; expected a parameter that is not pruned. "
                    "Collect before you prune, or leave it out."
                )
        self._sums = GradientSums(self._local, targets, self._group)
        self._sums.attach()


def _with_shards(
    pairs: list[tuple[nn.Module, str]], parameters: Pairs, group: ProcessGroup
) -> Communicator:
    """The ranks of a group and those that have other parts of some parameters; fills ``pairs``."""
    pairs += parameters
    reader = ShardReader()
    shards = []
    for position, pair in enumerate(pairs):
        module, name = checked_pair(pair, f"parameters[{position}]")
        shards.append(reader.read(module, name, label_of(pair, position)))
    return ranks_with_shards(shards, group)


def _matrices_of(target: Shard, module: nn.Module, name: str) -> WeightLayout:
    try:
        return matrices_of(module, name, target.shape)
    except NotImplementedError as error:
        raise NotImplementedError(f"{target.name}: {error}") from None
