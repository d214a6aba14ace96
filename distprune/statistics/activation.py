"""ActivationStatistics: sums of what layers are called with, and the scores that need them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from distprune._common.naming import NamedParameter
from distprune.budgets import outliers
from distprune.budgets.outliers import OWL_MULTIPLE, block_of
from distprune.call.replicas import count_live_and_compare
from distprune.files.checkpoints.statistics_file import read_statistics
from distprune.selection.matrix_sums import Summed, magnitude_sums
from distprune.selection.normalizing import Scored
from distprune.selection.scores import FactorScores, ScoreSource, TensorScores
from distprune.shards import factored
from distprune.shards.factored import POWER_OF_RIA, FactoredScores
from distprune.statistics.collected import CollectedInputs
from distprune.statistics.collecting import LocalStatistics
from distprune.statistics.layers import WeightLayout
from distprune.statistics.totals import Pairs, Totals, warn_of_empty

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

R = TypeVar("R")
A = TypeVar("A", bound="ActivationStatistics")


class ActivationStatistics(CollectedInputs):
    """Sums of the inputs of layers over calibration data, from which Wanda and others are made.

    statistics = ActivationStatistics(prune.select(model))
    with statistics.collecting():
        for batch in calibration:
            with statistics.batch(attention_mask=batch["attention_mask"]):
                model(**batch)
    prune.global_unstructured(..., importance_scores=statistics.wanda())

    For each input feature j of each layer: the sum of x_j and that of x_j**2 over all tokens of
    all data-parallel ranks, in fp64, and the number of tokens. One process that ran all batches
    would have the same sums, up to the rounding of fp64; if the inputs are integers, the same bits.

    What counts, and once (see statistics.input_parts): every token of data-parallel ranks, be it
    DDP, FSDP1, FSDP2, or both axes of HSDP; of tensor-parallel ranks, which have the same tokens,
    one. Features that tensor parallelism spreads over ranks are put in their place. Ranks may have
    unequal batches, or none: sums are divided by counts, never averaged.

    Layers: nn.Linear, transformers' Conv1D, and nn.Conv1d and nn.Conv2d, whose input features are
    the columns of the unfolded input; fused experts, each with sums and a number of tokens of its
    own (see statistics.experts). Of a tied parameter, the calls of all its layers count. A use of
    the weight outside of its layer, as ``F.linear(x, layer.weight)``, is not seen.

    Making the object, and everything that asks for statistics, is collective: all ranks do it, in
    the same order. Entering ``collecting`` or ``batch`` communicates nothing.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them.
        group: the ranks that take part; every rank by default. Under expert parallelism, an
            expert's statistics belong to the ranks that have it: make one object for the experts,
            with their data-parallel group, and another one for all other parameters.
        pipeline_parallel: the ranks have different parameters, which are joined by name.
        allow_empty: patterns, as ``select`` takes them, of parameters that may see no token, such
            as an expert: their scores are zero, with a warning. Of fused experts, some may always.

    Raises:
        NotImplementedError: a parameter whose layer's input is not seen or not known:
            nn.MultiheadAttention, embeddings, layers with a forward of their own, fused experts
            that do not say ``is_transposed``. On every rank.
        ValueError: ranks with different parameters; a pattern that matches none.

    Cost: 16 bytes per input feature on every rank, in a forward 16 more for each call of a layer,
    and 16 on the wire when statistics are asked for; about 100 bytes per parameter on the wire when
    the object is made. A forward reads each input once more, in fp64, chunk by chunk. Fused experts
    have their own input features.
    """

    def wanda(self, parameters: Pairs | None = None) -> dict[NamedParameter, FactoredScores]:
        """Scores of Wanda: |w_ij| times the root mean square of the input x_j. Collective.

        The paper has the norm of x_j over all tokens instead. Inside a layer that is a constant
        factor; divided by the number of tokens, layers that saw different numbers of them
        compare, such as experts.

        Args:
            parameters: some of the parameters; by default all.

        Returns:
            By (module, name): what ``importance_scores`` takes. Scores are computed while they
            are ranked and never stored; in memory are 4 bytes per input feature (per element for
            a convolution with groups).

        Raises, Cost: as :meth:`totals`. A warning names parameters that saw no token.

        Source: Sun et al., "A simple and effective pruning approach for large language models",
        arXiv 2306.11695.
        """
        totals = self._labelled(parameters)
        return self._scores(totals, lambda p: _wanda(totals[p.label], p.layout))

    def stade(self, parameters: Pairs | None = None) -> dict[NamedParameter, FactoredScores]:
        """Scores of STADE: |w_ij| times the standard deviation of the input x_j. Collective.

        What an input adds on average, a bias can make up for; see the paper for when that holds.
        The variance is that of all tokens, divided by their number.

        Args, Returns, Raises, Cost: as :meth:`wanda`.

        Source: Mecke et al., "STADE: standard deviation as a pruning metric", arXiv 2503.22451.
        """
        totals = self._labelled(parameters)

        def make(p: LocalStatistics) -> FactoredScores:
            own = totals[p.label]
            return factored.stade(p.layout, own.sums, own.squares, own.num_tokens)

        return self._scores(totals, make)

    def ria(
        self, parameters: Pairs | None = None, *, power: float = POWER_OF_RIA
    ) -> dict[NamedParameter, FactoredScores]:
        """Scores of RIA: relative importance of a weight, and activations. Collective.

        (|w_ij| / sum_i |w_ij| + |w_ij| / sum_j |w_ij|) * (root mean square of x_j) ** power, with
        sums over the unpruned elements of the column and of the row. A convolution with groups is
        as many matrices, and so are fused experts. As for :meth:`wanda`, the norm is divided by
        the number of tokens.

        Args:
            parameters: some of the parameters; by default all.
            power: of the norm; the paper's a.

        Returns, Raises: as :meth:`wanda`.

        Cost: as :meth:`wanda`; and two reads of the weights, and two all-reduces of 8 bytes per
        input feature and output. The sums are the same on every sharding.

        Source: Zhang et al., "Plug-and-play: an efficient post-training pruning method for large
        language models", ICLR 2024.
        """
        totals = self._labelled(parameters)
        layouts = self._layouts
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            targets = [target for target in self._read_weights() if target.label in totals]
            weights = [
                Summed.of(
                    Scored.of_shard(shard, TensorScores(shard.flat(shard.values))),
                    shard.index,
                    layouts[target.label],
                    is_here=bool(target.places),
                )
                for target in targets
                for shard in (target.shard,)
            ]
            # Of a convolution with groups, and of fused experts, each input feature belongs to one
            # of the matrices.
            found = magnitude_sums(weights, self._communicator)
        sums = {target.label: both for target, both in zip(targets, found, strict=True)}

        def make(p: LocalStatistics) -> FactoredScores:
            own = totals[p.label]
            return factored.ria(p.layout, own.squares, own.num_tokens, sums[p.label], power)

        return self._scores(totals, make)

    def outlier_ratios(
        self,
        *,
        threshold_multiple: float = OWL_MULTIPLE,
        per: Literal["block", "parameter"] = "block",
    ) -> dict[NamedParameter, float]:
        """The share of Wanda's scores that are outliers, for OWL. Collective.

        A score is an outlier if it is above ``threshold_multiple`` times the mean of the scores.
        The mean and the share are over the unpruned elements of all parameters of a block, as in
        the authors' code, or of each parameter alone. The counts are exact and, for given
        statistics, the same on every sharding.

        Args:
            threshold_multiple: the paper's M: 5, 7 or 10.
            per: what shares a mean. A block is the name of a parameter up to its first number:
                "model.layers.3" of "model.layers.3.mlp.up_proj.weight".

        Returns:
            By (module, name), between 0 and 1: what ``budgets.OWL`` takes.

        Raises: as :meth:`wanda`; ValueError for ``per``, and for weights that are not finite.

        Cost: as :meth:`wanda`; three reads of the weights; all-reduces of 56 bytes per parameter.

        Source: Yin et al., "Outlier weighed layerwise sparsity (OWL)", arXiv 2310.05175.
        """
        if per not in ("block", "parameter"):
            raise ValueError(f"per={per!r}; expected 'block' or 'parameter'.")
        totals = self._labelled(None)
        communicator, parts = self._communicator, []
        with communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            targets = self._read_weights()
            for target, parameter in zip(targets, self._local, strict=True):
                # Of a parameter that only other ranks have, no element is here to have a score.
                source: ScoreSource = TensorScores(target.shard.values)
                if target.places:
                    scores = _wanda(totals[target.label], parameter.layout)
                    source = FactorScores.of_shard(target.shard, scores, are_signed=True)
                parts.append(Scored.of_shard(target.shard, source))
            labels = [target.label for target in targets]
            ratios = outliers.outlier_ratios(
                parts,
                count_live_and_compare(targets, True, communicator),
                [block_of(label) if per == "block" else label for label in labels],
                threshold_multiple,
                communicator,
            )
        return self._by_pair(dict(zip(labels, ratios, strict=True)))

    def forget(self, parameters: Pairs | None = None) -> None:
        """Free what is too large to be kept for all parameters; here nothing is."""

    @classmethod
    def load(
        cls: type[A],
        path: str | os.PathLike[str],
        parameters: Pairs,
        *,
        group: ProcessGroup | None = None,
        pipeline_parallel: bool = False,
        allow_empty: str | Sequence[str] = (),
    ) -> A:
        """Statistics of a file that :meth:`save` wrote, for any sharding. Collective.

        Args:
            path: of the file; every rank reads it.
            parameters, group, pipeline_parallel, allow_empty: as for the class. The file may have
                statistics of more parameters.

        Raises:
            CheckpointError: of distprune.files.errors, no such file, or a malformed one.
            ValueError: a parameter that the file does not have, or that has another shape; ranks
                that read different files.
            NotImplementedError: as the class.

        Cost: a read of the file; all-reduces of some hundred bytes.
        """
        made = cls(
            parameters, group=group, pipeline_parallel=pipeline_parallel, allow_empty=allow_empty
        )
        made._load(os.fspath(path))
        return made

    def _load(self, path: str) -> None:
        self._restore_from(lambda: read_statistics(path), path)

    def _scores(
        self, totals: Mapping[str, Totals], make: Callable[[LocalStatistics], FactoredScores]
    ) -> dict[NamedParameter, FactoredScores]:
        """The scores of the parameters that have totals, by (module, name)."""
        warn_of_empty(totals, self._communicator)
        return self._by_pair({p.label: make(p) for p in self._local if p.label in totals})


def _wanda(totals: Totals, layout: WeightLayout) -> FactoredScores:
    return factored.wanda(layout, totals.squares, totals.num_tokens)


class BlockPasses(Protocol):
    """Runs the blocks of a model one by one, on what the blocks before have returned."""

    def collect(self, number: int, batch: int) -> None:
        """Run a block on a batch."""
        ...

    def advance(self, number: int) -> None:
        """Run a block on all batches: what it returns is for the next."""
        ...


def prune_sequentially(
    statistics: ActivationStatistics,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    batches: Iterable[Any],
    prune_block: Callable[[list[NamedParameter]], R],
    *,
    forward: Callable[[Any], object] | None = None,
    passes: BlockPasses | None = None,
    finished: int = 0,
) -> list[R]:
    """Collect statistics of one block after the other, and prune each before the next. Collective.

    def prune_block(parameters):
        return prune.global_unstructured(
            parameters, prune.L1Unstructured, statistics.wanda(parameters), amount=0.5
        )

    reports = prune_sequentially(statistics, model, model.model.layers, batches, prune_block)

    For each block the whole model runs over all batches, and the inputs of that block are
    collected: those that the blocks before it give as they are now, pruned. This holds on every
    wrapper, as nothing but the model itself is called. The statistics are ``sequential``
    afterwards, and complete: they can be saved.

    Args:
        statistics: new ones; each of their parameters is in one of the blocks.
        model: in evaluation mode, wrapped or not.
        blocks: modules of the model, in the order in which they run.
        batches: this rank's; they are run once per block, so a list or a data set, no iterator.
            Ranks of DDP, or without a wrapper, may have unequal numbers of them.
        prune_block: prunes the parameters that it gets, (module, name) pairs; what it returns is
            collected.
        forward: runs the model on a batch, and takes care of padding (``statistics.batch``). By
            default a mapping becomes keyword arguments, a tuple or list arguments, and an
            ``attention_mask`` [batch, tokens] in a mapping says what is padding.
        passes: runs the blocks one by one, where this is known to be the same.
        finished: blocks with parameters that are done already, as those of an earlier run.

    Returns:
        What ``prune_block`` returned for each other block that has parameters.

    Raises:
        RuntimeError: something was collected before.
        TypeError: ``batches`` is an iterator.
        ValueError: a parameter in no block, or in two; and as ``ActivationStatistics.totals``.
        NotImplementedError: statistics with pipeline_parallel.
        Exception: of the model, of ``batches`` and of ``prune_block``, on every rank. Blocks before
            stay pruned; hooks are gone.

    Cost: one forward of the model per block and batch: as many times that of one pass as there are
    blocks. No activations are kept. Gram matrices of a block are forgotten after its pruning.
    """
    communicator = statistics._communicator

    def begin() -> list[list[LocalStatistics]]:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"batches is a {type(batches).__name__}, which can be run through once; expected a "
                "list or a data set: every block needs all batches."
            )
        return _parameters_of_blocks(statistics, list(blocks))

    with communicator.exclusively():
        of_block = communicator.run(
            begin,
            lambda made: [
                (f"block {number}", ", ".join(parameter.label for parameter in parameters))
                for number, parameters in enumerate(made)
            ],
        )
    statistics._mode = "sequential"
    results = []
    with communicator.raising_everywhere():
        to_do = [number for number, parameters in enumerate(of_block) if parameters][finished:]
        last = max(to_do, default=-1)
        for number, parameters in enumerate(of_block[: last + 1]):
            if number in to_do:
                with statistics._collector.collecting(parameters):
                    for position, batch in enumerate(batches):
                        if passes is not None:
                            passes.collect(number, position)
                        elif forward is not None:
                            forward(batch)
                        else:
                            _run(statistics, model, batch)
                pairs = [NamedParameter(*p.places[0], p.label) for p in parameters]
                results.append(prune_block(pairs))
                statistics.forget(pairs)
            if passes is not None and number < last:
                passes.advance(number)
    communicator.agree()
    return results


def _parameters_of_blocks(
    statistics: ActivationStatistics, blocks: Sequence[nn.Module]
) -> list[list[LocalStatistics]]:
    """Check that nothing was collected yet, and list the parameters of each block.

    Raises:
        NotImplementedError: parameters of pipeline stages.
        RuntimeError: something was collected before.
        ValueError: a parameter in no block, or in two.
    """
    if statistics._arguments.pipeline_parallel:
        raise NotImplementedError(
            "pipeline_parallel=True: the ranks have different blocks; expected every block on "
            "every rank. Collect in one pass instead."
        )
    if statistics.mode == "sequential" or any(
        any(parameter.calls) or parameter.loaded is not None for parameter in statistics._local
    ):
        raise RuntimeError(
            "something was collected already; expected new ActivationStatistics, or the inputs "
            "of one pass would mix with those of pruned blocks."
        )
    inside = [{id(module) for module in block.modules()} for block in blocks]
    of_block: list[list[LocalStatistics]] = [[] for _ in blocks]
    for parameter in statistics._local:
        numbers = {
            number
            for number, modules in enumerate(inside)
            for module, _ in parameter.places
            if id(module) in modules
        }
        if len(numbers) != 1:
            where = f"blocks {sorted(numbers)}" if numbers else "no block"
            raise ValueError(
                f"{parameter.label} is in {where}; expected every parameter in one block. Make "
                "the statistics with parameters of the blocks only: select(model, include=...)."
            )
        of_block[numbers.pop()].append(parameter)
    return of_block


def _run(statistics: ActivationStatistics, model: nn.Module, batch: Any) -> None:
    if not isinstance(batch, Mapping):
        model(*batch if isinstance(batch, (tuple, list)) else (batch,))
        return
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        with statistics.batch(mask):
            model(**batch)
    else:
        model(**batch)
