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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distprune.base.blocks import WeightLayout
from distprune.base.naming import NamedParameter, checked_pair, label_of
from distprune.call.request import ParameterArguments
from distprune.criteria.base import RankBatches, check_between, collecting, rank_batch
from distprune.ranks.collectives import Communicator, world
from distprune.shards import factored, reader
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import is_cut, placed
from distprune.shards.shard import Shard
from distprune.statistics.parameters import (
    Entry,
    Pairs,
    Statistics,
    difference_of,
    layout_of,
    peers_of,
    ranks_at,
    spans,
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
        self, parameters: Sequence[Entry], shards: Sequence[Shard], data_ranks: ProcessGroup | None
    ) -> None:
        sources = reader.unaveraged_gradients(shards, data_ranks)
        super().__init__(sources, [parameter.label for parameter in parameters], 2)
        self._layouts, self._shards = [parameter.layout for parameter in parameters], shards
        self._blocks = {
            position: gradient_block(shards[position], self._layouts[position], source.data_groups)
            for source in sources
            for position in source.runs
        }
        # By position, sums by output and by input, of the whole parameter.
        self._sums: dict[int, list[Tensor]] = {}

    def packed(self, rank: int) -> list[Tensor]:
        """What this rank adds of each parameter, as ``Statistics`` sums it up.

        Raises:
            RuntimeError: what went wrong in a batch.
        """
        if self.problem is not None:
            raise self.problem
        known = {ranks for _, ranks, _ in self._blocks.values() if ranks}
        peers = peers_of(known, rank)  # for parameters that do not tell
        vectors = []
        for position, layout in enumerate(self._layouts):
            of_block = self._blocks[position][1:]
            batch_ranks, ranks = (peers if own is None else own for own in of_block)
            vector = torch.zeros(3 + layout.num_outputs + layout.num_inputs, dtype=torch.float64)
            if rank in batch_ranks:
                vector[0] = difference_of(self.weight, batch_ranks, rank)
                vector[2] = self.weight * (rank == batch_ranks[0])
            if position in self._sums and rank == ranks[0]:
                vector[3:] = torch.cat([total.view(-1).cpu() for total in self._sums[position]])
            vectors.append(vector)
        return vectors

    def _add(self, number: int, gradient: Tensor, factor: float) -> None:
        for position in self._sources[number].runs if factor else ():
            managed, layout = self._shards[position].managed, self._layouts[position]
            own = gradient if managed is None else managed.of_leaf(gradient)
            if position not in self._sums:
                shapes = [(layout.num_matrices, size) for size in layout.matrix_shape]
                self._sums[position] = [
                    torch.zeros(shape, dtype=torch.float64, device=own.device) for shape in shapes
                ]
            counts, *both = self._blocks[position][0]
            sums = squares_along(own.reshape(len(counts), *map(len, both)))
            if layout.is_transposed:
                both, sums = both[::-1], sums[::-1]
            for total, where, of_block in zip(self._sums[position], both, sums, strict=True):
                part = total[counts.start : counts.stop, where.start : where.stop]
                part.add_(of_block, alpha=factor)


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


# What the gradient of a parameter on this rank is of: ranges of the matrices, and of the first and
# the second dimension in them; the ranks that run the same batches as this one, None if the
# parameter does not tell; and those of them whose gradients are of the same elements. See
# [Note: blocks of gradients].
GradientBlock = tuple[Sequence[range], tuple[int, ...] | None, tuple[int, ...] | None]


def gradient_block(
    shard: Shard, layout: WeightLayout, data_groups: Sequence[ProcessGroup]
) -> GradientBlock:
    """The block of a parameter.

    Args:
        shard: this rank's part of the parameter.
        layout: of the parameter.
        data_groups: the ranks that run other batches on it: see ``GradientSource``.

    Raises:
        NotImplementedError: a part of a convolution, or of groups of rows.
    """
    mesh = shard.mesh
    coordinate = None if mesh is None else mesh.get_coordinate()
    dims = layout.matrix_shape[::-1] if layout.is_transposed else layout.matrix_shape
    ranges: Sequence[range] = [range(size) for size in (layout.num_matrices, *dims)]
    if mesh is None:
        return ranges, None, None
    if coordinate is None:  # outside of the mesh: no gradient comes, and no batch counts
        return [range(0)] * 3, (), ()
    from torch.distributed.tensor import Replicate

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
    if same_batches == list(coordinate):
        return ranges, None, None
    index, *_ = placed(shard.name, shard.shape, tuple(mesh.shape), coordinate, placements)
    is_part = any(map(is_cut, placements))
    if is_part and (layout.kind == "convolution" or index.fold is not None):
        raise NotImplementedError(
            f"{shard.name}: the gradient on a rank is of a part of a convolution, or of groups of "
            f"rows ({shard.layout}); expected matrices that are split along whole dimensions."
        )
    if is_part:
        ranges = index.coordinates if layout.are_experts else (range(1), *index.coordinates)
    return ranges, ranks_at(mesh, same_batches), ranks_at(mesh, same_elements)


class GradientStatistics(Statistics):
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
    _OF_GRADIENTS = True
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

        def ranks() -> Communicator:
            """Ranks that have other parts of the same parameters take part too."""
            pairs.extend(parameters)
            shard_reader = reader.ShardReader()
            shards = [
                shard_reader.read(*checked_pair(pair, f"parameters[{n}]"), label_of(pair, n))
                for n, pair in enumerate(pairs if group is not None else ())
            ]
            return reader.ranks_with_shards(shards, group)

        communicator = world(group).run(ranks)
        self._read(communicator, lambda: ParameterArguments(parameters=pairs), matrices_of)
        for parameter in self._local:  # the ranks have seen nothing, and add up when they have
            shapes = self._shapes(parameter.layout)
            counts, first, second = (torch.zeros(s, dtype=torch.float64) for s in shapes)
            parameter.total = counts, first, second

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
            shards = self._shards()
            communicator.run(lambda: self._attach(shards))

        def finish() -> None:
            packed = communicator.run(lambda: self._sums.packed(communicator.rank))
            found = self._sum_over_ranks(self._local, lambda: packed)
            for parameter, new in zip(self._local, found, strict=True):
                parameter.add_to_total(new)

        with collecting(self, communicator, attach, finish):
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
        with rank_batch(self, weight, loss_scale, self._communicator.size):
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
        """Scores of the Fisher information by factors. Collective.

        They are |w_ij| * sqrt(c_j * sqrt(r_i) / R): r_i and c_j are the sums of the mean of g**2
        over row i and over column j of a matrix, R is the sum of sqrt(r). Without the roots of r,
        they would be the root of Fisher's ``w**2 * E[g**2]``, where Adafactor's matrix of rank one,
        ``r_i * c_j / sum of r``, replaces the mean of each element. The roots halve how much rows
        differ, and keep the sum of the matrix: which outputs matter depends on the text, and models
        that are pruned so are better on other texts. A matrix without gradients is ranked by
        magnitude, times the typical score of its siblings; a warning names it.

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
                text = "the weights of all its batches are 0, or there was none; expected a batch."
                raise ValueError(f"{parameter.label}: {text}")
        return self._scores(asked, lambda p: factored.fisher(p.layout, *p.sums[1:], self._count(p)))

    def _count(self, parameter: Entry) -> float:
        return float(parameter.sums[0])

    def _shapes(self, layout: WeightLayout) -> tuple[tuple[int, ...], ...]:
        return (1,), (layout.num_outputs,), layout.input_shape

    _sums: Any = None
    _check_ready = check_between

    def _attach(self, shards: Sequence[Shard]) -> None:
        """Put hooks on."""
        for shard in shards:
            reader.check_trainable(shard)
            if find_held(*shard.places[0]) is not None:
                raise NotImplementedError(
                    f"{shard.name} is pruned and sharded, where gradients of pruned elements would "
                    "count. Expected statistics that are collected before a pruning."
                )
        self._sums = GradientSums(self._local, shards, self._group)
        self._sums.attach()


def matrices_of(shard: Shard, module: nn.Module, name: str) -> WeightLayout:
    """How a parameter lies as matrices of outputs and inputs, whatever its layer does with it.

    Where that is not known, rows are outputs: dimension 0 of two, and of more than three; of three
    dimensions, dimension 0 counts matrices.

    Raises:
        NotImplementedError: fewer than two dimensions.
    """
    shape = shard.shape
    known = layout_of(module, name, shape)
    if known is not None:
        return known
    if len(shape) < 2:
        text = f"it has {len(shape)} dimension(s); expected two or more."
        raise NotImplementedError(f"{shard.name}: {text}")
    if isinstance(module, nn.modules.conv._ConvNd):
        return WeightLayout("convolution", tuple(shape), 1 if module.transposed else module.groups)
    return WeightLayout({2: "linear", 3: "experts"}.get(len(shape), "convolution"), tuple(shape))
