"""GradientStatistics: sums of squared gradients by output and by input, and Fisher by factors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from distprune.base.naming import NamedParameter, checked_pair, label_of
from distprune.call.reading import read_parameters
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.statistics_file import (
    StoredGradients,
    read_gradient_statistics,
)
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.shards import factored
from distprune.shards.factored import FactoredScores
from distprune.shards.gradients import check_trainable, ranks_with_shards
from distprune.shards.parameters import Target
from distprune.shards.rank_batches import checked_loss_scale, checked_weight
from distprune.shards.reader import ShardReader
from distprune.statistics.gradient_sums import GradientSums, GradientTotals
from distprune.statistics.layers import matrices_of
from distprune.statistics.totals import (
    OfParameter,
    Pairs,
    StatisticsOfParameters,
    named_experts,
    warn_of_zero_scores,
)
from distprune.wrappers.masked_value import shard_mask_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class _OfParameter(OfParameter):
    """The statistics of one parameter, of all ranks.

    Attributes:
        totals: so far.
    """

    totals: GradientTotals


class GradientStatistics(StatisticsOfParameters):
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

    _local: Sequence[_OfParameter]
    _mode = "gradients"

    def __init__(self, parameters: Pairs, *, group: ProcessGroup | None = None) -> None:
        self._group = group
        pairs: list[tuple[nn.Module, str]] = []

        def arguments() -> ParameterArguments:
            return ParameterArguments(parameters=pairs or list(parameters))

        communicator = world(group)
        if group is not None:
            # Ranks that have other parts of the same parameters take part too.
            communicator = communicator.run(lambda: _with_shards(pairs, parameters, group))
        with communicator.exclusively():
            read, targets = read_parameters(arguments, communicator)
            local = communicator.run(
                lambda: _described(targets),
                lambda made: [(f"matrices of {each.label}", str(each.layout)) for each in made],
            )
        super().__init__(communicator, read, targets, local)
        self._sums: GradientSums | None = None

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
        if self._sums is not None:
            raise RuntimeError("calibrating() inside of calibrating(); expected one at a time.")
        communicator = self._communicator
        made: list[GradientSums] = []  # stays on this rank if another one fails
        try:
            with torch.inference_mode(False), torch.no_grad(), communicator.exclusively():
                _, targets = read_parameters(lambda: self._arguments, communicator)
                communicator.run(lambda: self._attach(targets, made))
            (self._sums,) = made
            with communicator.raising_everywhere():
                yield
            with torch.inference_mode(False), torch.no_grad(), communicator.exclusively():
                found = made[0].finish(communicator)
            for parameter in self._local:
                parameter.totals = parameter.totals.plus(found[parameter.label])
        finally:
            self._sums = None
            for sums in made:
                sums.detach()

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
        weight, scale = checked_weight(weight), checked_loss_scale(loss_scale)
        if self._sums is None:
            raise RuntimeError(
                "batch() outside of calibrating(); expected `with statistics.calibrating():` "
                "around the loop."
            )
        with self._sums.batch(weight, scale):
            yield
        if self._sums.problem is not None and self._communicator.size == 1:
            raise self._sums.problem

    def totals(self, parameters: Pairs | None = None) -> dict[NamedParameter, GradientTotals]:
        """The sums over all ranks, bit-equal on all of them. Collective.

        Args:
            parameters: some of the parameters, the same on all ranks; by default all.

        Raises:
            ValueError: a parameter that these statistics do not have.
            RuntimeError: inside of ``calibrating``.

        Cost: an all-reduce of 40 bytes.
        """
        return self._by_pair({p.label: p.totals for p in self._asked(parameters)})

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
            if not parameter.totals.weight:
                raise ValueError(
                    f"{parameter.label}: the weights of all its batches are 0, or there was none; "
                    "expected a batch with a positive one inside of calibrating()."
                )
        _warn_of_zeros(asked, self._communicator)
        return self._by_pair(
            {
                p.label: factored.fisher(
                    p.layout, p.totals.by_output, p.totals.by_input, p.totals.weight
                )
                for p in asked
            }
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
        where = os.fspath(path)
        _, stored = made._read(lambda: ("gradients", read_gradient_statistics(where)), where)
        for parameter in made._local:
            found = stored[parameter.label]
            both = map(torch.from_numpy, found.arrays)
            parameter.totals = GradientTotals(found.weight, *both)
        return made

    def _stored(self) -> dict[str, StoredGradients]:
        return {p.label: p.totals.as_stored(p.layout) for p in self._asked(None)}

    def _attach(self, targets: list[Target], made: list[GradientSums]) -> None:
        """Put hooks on; ``made`` gets what takes them off."""
        for target in targets:
            check_trainable(target.shard)
            (module, name), *_ = target.places
            if target.shard.managed is not None and shard_mask_key(name) in module.__dict__:
                raise NotImplementedError(
                    f"{target.label} is pruned, and FSDP shows the gradients of its pruned "
                    "elements too, which would count; expected a parameter that is not pruned. "
                    "Collect before you prune, or leave it out."
                )
        sums = GradientSums(targets, self._layouts, self._group)
        made.append(sums)
        sums.attach()

    def _asked(self, parameters: Pairs | None) -> list[_OfParameter]:
        """The parameters that all ranks ask for. Collective."""

        def positions() -> list[int]:
            if self._sums is not None:
                raise RuntimeError(
                    "the ranks have not added up what they saw yet; expected a call after "
                    "calibrating()."
                )
            return self._positions_of(parameters)

        found = self._communicator.run(
            positions, lambda asked: [("parameters of statistics", str(asked))]
        )
        return [self._local[position] for position in dict.fromkeys(found)]


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


def _described(targets: list[Target]) -> list[_OfParameter]:
    """Empty statistics of parameters."""
    described = []
    for target in targets:
        try:
            layout = matrices_of(*target.places[0], target.shard.shape)
        except NotImplementedError as error:
            raise NotImplementedError(f"{target.label}: {error}") from None
        totals = GradientTotals.none_of(layout)
        described.append(_OfParameter(target.label, target.places, layout, totals))
    return described


def _warn_of_zeros(asked: list[_OfParameter], communicator: Communicator) -> None:
    """Warn, on the first rank, of parameters and experts whose gradients are all zero."""
    zero = []
    for parameter in asked:
        counts = parameter.totals.by_input.reshape(parameter.layout.num_matrices, -1).any(1)
        if not bool(counts.any()):
            zero.append(parameter.label)
        elif parameter.layout.are_experts and not bool(counts.all()):
            zero.append(named_experts(counts.tolist(), parameter.label))
    warn_of_zero_scores("all gradients are zero of", zero, "data", communicator, stacklevel=4)
