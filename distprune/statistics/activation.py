"""Sums of what layers are called with, scores that need them, and pruning block after block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distprune.base.amount import listed
from distprune.base.blocks import WeightLayout
from distprune.base.naming import NamedParameter
from distprune.base.selecting import matcher
from distprune.budgets import OWL_MULTIPLE, block_of, outlier_ratios
from distprune.call.reading import count_live_and_compare
from distprune.call.request import ParameterArguments
from distprune.ranking.scores import FactorScores, ScoreSource
from distprune.ranking.sums import Scored, magnitude_sums
from distprune.ranks.collectives import world
from distprune.shards import factored
from distprune.shards.factored import POWER_OF_RIA, FactoredScores
from distprune.shards.shard import Shard
from distprune.statistics.collecting import Collector
from distprune.statistics.parameters import (
    Entry,
    Pairs,
    Statistics,
    difference_of,
    layout_of,
    peers_of,
)

R = TypeVar("R")
Mode = Literal["one_pass", "sequential"]


@dataclass(frozen=True)
class Totals:
    """The statistics of one parameter's inputs over all ranks; equal on all of them.

    Attributes:
        num_tokens: how many inputs were seen; of fused experts, by each of them.
        sums: fp64, of the input shape: the sum of each input feature over all tokens.
        squares: fp64, of the same shape: the sum of its squares.
    """

    num_tokens: int | tuple[int, ...]
    sums: Tensor
    squares: Tensor


class ActivationStatistics(Statistics, Collector):
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

    What counts, and once (see statistics.parameters): every token of data-parallel ranks, be it
    DDP, FSDP1, FSDP2, or both axes of HSDP; of tensor-parallel ranks, which have the same tokens,
    one. Features that tensor parallelism spreads over ranks are put in their place. Ranks may have
    unequal batches, or none: sums are divided by counts, never averaged.

    Layers: nn.Linear, transformers' Conv1D, and nn.Conv1d and nn.Conv2d, whose input features are
    the columns of the unfolded input; fused experts, each with sums and a number of tokens of its
    own (see statistics.collecting). Of a tied parameter, the calls of all its layers count. A use
    of the weight outside of its layer, as ``F.linear(x, layer.weight)``, is not seen.

    Making the object, and everything that asks for statistics, is collective: all ranks do it, in
    the same order. Entering ``collecting`` or ``batch`` communicates nothing.

    Args:
        parameters: (module, name) pairs, as ``select`` lists them.
        group: the ranks that take part; every rank by default. Under expert parallelism, an
            expert's statistics belong to the ranks that have it: make one object for the experts,
            with their data-parallel group, and another one for all other parameters.
        pipeline_parallel: the ranks have different parameters, which are joined by name.
        allow_empty: patterns, as ``select`` takes them, of parameters that may see no token, such
            as an expert: with a warning, they are ranked by magnitude times the typical score of
            the other experts of the layer. Of fused experts, some may always.

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

    _mode: Mode = "one_pass"
    _OF_GRADIENTS = False
    _NOT_FINITE = (
        "the sum of its inputs is not finite: a NaN or an infinity was among them. Expected finite "
        "activations. Padding may hold NaN: pass its attention_mask to batch()."
    )
    _UNEQUAL = (
        "ranks of one tensor-parallel group saw different inputs; expected the same batches on all "
        "of them, and DTensors as inputs of layers that run on parts of a sequence."
    )

    def __init__(
        self,
        parameters: Pairs,
        *,
        group: ProcessGroup | None = None,
        pipeline_parallel: bool = False,
        allow_empty: str | Sequence[str] = (),
    ) -> None:
        def arguments() -> ParameterArguments:
            patterns = [allow_empty] if isinstance(allow_empty, str) else list(allow_empty)
            self._allow_empty = patterns
            return ParameterArguments(
                parameters=list(parameters),
                pipeline_parallel=pipeline_parallel,
                facts=[("allow_empty", str(patterns))],
            )

        super().__init__()
        self._read(world(group), arguments, _known_layout)
        self._communicator.run(self._check_patterns)

    @property
    def mode(self) -> Mode:
        """How the statistics were collected.

        "one_pass": the inputs of all layers in one run of the model. "sequential": block after
        block, where the blocks before were pruned already, as Wanda was published.
        """
        return self._mode

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect from every forward of the layers while the context is open.

        Forwards run without gradients, and compiled modules run uncompiled. Enter it after the
        model has been wrapped and parallelised. Its hooks are gone afterwards, also after an
        error. It may be entered several times: sums go on.

        A forward that raises, caught or not, and an error that leaves the context make these
        statistics unusable: what asks for them raises. Start anew.

        Raises:
            RuntimeError: it is open already; a layer runs with gradients enabled; the statistics
                are sequential.
            NotImplementedError: an input whose layout is not known; fused experts that use their
                weight in an unknown way, as batched_mm does.
            Exception: of the code inside. The other ranks raise it in their next call of this
                library, for which the rank that failed waits: catch such errors inside.
        """
        if self._mode == "sequential":
            raise RuntimeError(
                "these statistics are sequential, and the inputs of one pass would mix with those "
                "of pruned blocks; expected new ActivationStatistics."
            )
        with self._communicator.raising_everywhere(), self._collecting(self._local):
            yield

    def num_tokens(self, parameters: Pairs | None = None) -> dict[str, int | tuple[int, ...]]:
        """How many tokens each parameter has seen, by its name. Collective.

        Of fused experts it is a tuple: how many came to each expert.

        Raises, Cost: as :meth:`totals`.
        """
        return {p.label: self._count(p) for p in self._asked(parameters)}

    def totals(self, parameters: Pairs | None = None) -> dict[NamedParameter, Totals]:
        """The sums over all ranks, bit-equal on all of them. Collective.

        Args:
            parameters: some of the parameters; by default all.

        Raises:
            ValueError: a layer that was not called, and is not among ``allow_empty``; sums that
                are not finite; ranks of a tensor-parallel group with different inputs.
            RuntimeError: a forward raised while they were collected.

        Cost: all-reduces of 40 bytes and of 16 bytes per parameter; and, for parameters of which
        something is new, one of 16 bytes per input feature and about 32 per parameter.
        """
        return self._by_pair(self._asked(parameters), lambda p: Totals(self._count(p), *p.sums[1:]))

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
        return self._scores(self._asked(parameters), self._wanda)

    def stade(self, parameters: Pairs | None = None) -> dict[NamedParameter, FactoredScores]:
        """Scores of STADE: |w_ij| times the standard deviation of the input x_j. Collective.

        What an input adds on average, a bias can make up for; see the paper for when that holds.
        The variance is that of all tokens, divided by their number.

        Args, Returns, Raises, Cost: as :meth:`wanda`.

        Source: Mecke et al., "STADE: standard deviation as a pruning metric", arXiv 2503.22451.
        """

        def stade(parameter: Entry) -> FactoredScores:
            return factored.stade(parameter.layout, *parameter.sums[1:], self._count(parameter))

        return self._scores(self._asked(parameters), stade)

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
        asked = {parameter.label: parameter for parameter in self._asked(parameters)}
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            shards = [shard for shard in self._shards() if shard.name in asked]
            weights = []
            for shard in shards:
                part = Scored(shard, ScoreSource(shard.flat_values))
                weights.append((part, shard.index, asked[shard.name].layout))
            found = magnitude_sums(weights, self._communicator)
        sums = {shard.name: both for shard, both in zip(shards, found, strict=True)}

        def ria(parameter: Entry) -> FactoredScores:
            count, magnitudes = self._count(parameter), sums[parameter.label]
            return factored.ria(parameter.layout, parameter.sums[2], count, magnitudes, power)

        return self._scores([*asked.values()], ria)

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
            By (module, name), between 0 and 1: what ``budgets.owl`` takes.

        Raises: as :meth:`wanda`; ValueError for ``per``, and for weights that are not finite.

        Cost: as :meth:`wanda`; three reads of the weights; all-reduces of 56 bytes per parameter.

        Source: Yin et al., "Outlier weighed layerwise sparsity (OWL)", arXiv 2310.05175.
        """
        if per not in ("block", "parameter"):
            raise ValueError(f"per={per!r}; expected 'block' or 'parameter'.")
        local, parts = self._without_empty(self._asked(None)), []
        names = [parameter.label for parameter in local]
        with self._communicator.exclusively(), torch.no_grad(), torch.inference_mode(False):
            shards = self._shards()
            for shard, parameter in zip(shards, local, strict=True):
                # Of a parameter that only other ranks have, no element is here to have a score.
                source: ScoreSource = ScoreSource(shard.values)
                if shard.places:
                    scores = self._wanda(parameter)
                    source = FactorScores.of_shard(shard, scores, are_signed=True)
                parts.append(Scored(shard, source))
            ratios = outlier_ratios(
                parts,
                count_live_and_compare(shards, True, self._communicator),
                [block_of(name) for name in names] if per == "block" else names,
                threshold_multiple,
                self._communicator,
            )
        of_name = dict(zip(names, ratios, strict=True))
        return self._by_pair(local, lambda p: of_name[p.label])

    def forget(self, parameters: Pairs | None = None) -> None:
        """Free what is too large to be kept for all parameters; here nothing is."""

    def _count(self, parameter: Entry) -> int | tuple[int, ...]:
        counts = tuple(map(int, parameter.sums[0].tolist()))
        return counts if parameter.layout.are_experts else counts[0]

    def _shapes(self, layout: WeightLayout) -> tuple[tuple[int, ...], ...]:
        return (layout.num_token_counts,), layout.input_shape, layout.input_shape

    def _wanda(self, parameter: Entry) -> FactoredScores:
        squares = parameter.sums[2]
        return factored.wanda(parameter.layout, squares, self._count(parameter))

    def _check_ready(self) -> None:
        if self._has_failed:
            raise RuntimeError(
                "a forward raised while statistics were collected, so that it is not known "
                "which inputs count; expected new statistics, collected again."
            )

    def _check_patterns(self) -> None:
        labels = [parameter.label for parameter in self._local]
        for pattern in self._allow_empty:
            if not any(map(matcher(pattern), labels)):
                raise ValueError(
                    f"allow_empty: {pattern!r} matches no parameter; expected globs or 're:' "
                    f"patterns for names such as {labels[0]}."
                )

    def _sum(self, parameters: Sequence[Entry]) -> None:
        """Sum up what all ranks have seen. Collective.

        Of ranks that run the model on the same tokens one counts; the others are compared with it.

        Raises:
            ValueError: a layer that was not called; sums that are not finite; ranks of a
                tensor-parallel group that ran on different tokens. On every rank.

        Cost: one all-reduce of 16 bytes per input feature, and 24 per parameter and expert.
        """
        rank = self._communicator.rank
        peers = peers_of(self._same_tokens, rank)
        found = self._sum_over_ranks(
            parameters, lambda: [_packed(p, peers, rank) for p in parameters]
        )
        may_be_empty = [matcher(pattern) for pattern in self._allow_empty]
        silent = [
            parameter.label
            for parameter, sums in zip(parameters, found, strict=True)
            if parameter.total is None
            and not bool(sums[0].any())
            and not any(matches(parameter.label) for matches in may_be_empty)
        ]
        if silent:
            raise ValueError(
                f"{listed(silent)}: the layer was not called on any rank while statistics were "
                "collected. Either its weight is used without calling it "
                "(nn.MultiheadAttention): leave it out. Or no token came to it (an expert): "
                'allow_empty="..." ranks it by magnitude.'
            )
        for parameter, sums in zip(parameters, found, strict=True):
            parameter.add_to_total(sums)


def _known_layout(target: Shard, module: nn.Module, name: str) -> WeightLayout:
    """How a parameter meets the inputs of its layer; NotImplementedError if that is not known."""
    layout = layout_of(module, name, target.shape)
    if layout is None:
        raise NotImplementedError(
            f"{target.name} ({name} of {type(module).__name__}): what is multiplied with it is "
            "not known from what its module is called with. Expected weights of nn.Linear, "
            "nn.Conv1d and nn.Conv2d, of transformers' Conv1D, or of its fused experts. Leave "
            "others (embeddings) out, for example by select(model, types=torch.nn.Linear)."
        )
    return layout


def _packed(parameter: Entry, peers: tuple[int, ...], rank: int) -> Tensor:
    """What this rank adds of a parameter, as ``Statistics`` sums it up."""
    layout = parameter.layout
    checks, tokens = [0.0, 0.0], [0.0] * layout.num_token_counts
    totals = torch.zeros(2, layout.num_inputs, dtype=torch.float64)
    for part, (count, sums) in parameter.seen.items():
        # The ranks with the tokens of a part, and those with the features too; plain ones: peers.
        token_ranks, ranks = part.token_ranks or peers, part.ranks or peers
        num_tokens, local = float(count), sums.cpu()
        checks[0] += difference_of(num_tokens, token_ranks, rank)
        checks[1] += difference_of(float(local[1].sum()), ranks, rank)
        if rank == token_ranks[0]:
            tokens[part.features.start * len(tokens) // max(1, layout.num_inputs)] += num_tokens
        if rank == ranks[0]:
            totals[:, part.features.start : part.features.stop] += local
    head = torch.tensor([*checks, *tokens], dtype=torch.float64)
    return torch.cat([head, totals.view(-1)])


def prune_sequentially(
    statistics: ActivationStatistics,
    model: nn.Module,
    blocks: Iterable[nn.Module],
    batches: Iterable[Any],
    prune_block: Callable[[list[NamedParameter]], R],
    *,
    run: Callable[[int, Any], object] | None = None,
    advance: Callable[[int], None] | None = None,
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
        run: runs the model, or only the block of a number where this gives the same, on a batch,
            and takes care of padding (``statistics.batch``). By default the model runs: a mapping
            becomes keyword arguments, a tuple or list arguments, and an ``attention_mask``
            [batch, tokens] in a mapping says what is padding.
        advance: runs the block of a number on all batches, after its pruning: what it returns is
            for the next.

    Returns:
        What ``prune_block`` returned for each block that has parameters.

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

    def begin() -> list[list[Entry]]:
        if isinstance(batches, Iterator):
            raise TypeError(
                f"batches is a {type(batches).__name__}, which ends after one block; expected a "
                "list or a data set."
            )
        return _parameters_of_blocks(statistics, blocks)

    def facts(found: list[list[Entry]]) -> list[tuple[str, str]]:
        return [("blocks", str([[parameter.label for parameter in each] for each in found]))]

    with communicator.exclusively():
        of_block = communicator.run(begin, facts)
    statistics._mode = "sequential"
    results = []
    with communicator.raising_everywhere():
        last = max((number for number, parameters in enumerate(of_block) if parameters), default=-1)
        for number, parameters in enumerate(of_block[: last + 1]):
            if parameters:
                with statistics._collecting(parameters):
                    for batch in batches:
                        run(number, batch) if run else _run(statistics, model, batch)
                pairs = [NamedParameter(*p.places[0], p.label) for p in parameters]
                results.append(prune_block(pairs))
                statistics.forget(pairs)
            if advance is not None and number < last:
                advance(number)
    communicator.agree()
    return results


def _parameters_of_blocks(
    statistics: ActivationStatistics, blocks: Iterable[nn.Module]
) -> list[list[Entry]]:
    """Check that nothing was collected yet, and list the parameters of each block.

    Raises:
        NotImplementedError: parameters of pipeline stages.
        RuntimeError: something was collected before.
        ValueError: a parameter in no block, or in two.
    """
    if statistics._arguments.pipeline_parallel:
        raise NotImplementedError(
            "pipeline_parallel=True: the ranks have different blocks; expected every block on "
            "every rank."
        )
    if statistics.mode == "sequential" or any(p.seen or p.total for p in statistics._local):
        raise RuntimeError(
            "something was collected already, and would mix with the inputs of pruned blocks; "
            "expected new ActivationStatistics."
        )
    inside = [set(block.modules()) for block in blocks]
    of_block: list[list[Entry]] = [[] for _ in inside]
    for parameter in statistics._local:
        owners = {module for module, _ in parameter.places}
        numbers = [number for number, modules in enumerate(inside) if owners & modules]
        if len(numbers) != 1:
            where = f"blocks {numbers}" if numbers else "no block"
            raise ValueError(
                f"{parameter.label} is in {where}; expected every parameter in one block. Exclude "
                "those outside of blocks."
            )
        of_block[numbers[0]].append(parameter)
    return of_block


def _run(statistics: ActivationStatistics, model: nn.Module, batch: Any) -> None:
    """Run a model on a batch, without its padding."""
    if isinstance(batch, Mapping):
        mask = batch.get("attention_mask")
        is_padding = isinstance(mask, Tensor) and mask.ndim == 2
        with statistics.batch(mask if is_padding else None):
            model(**batch)
    else:
        model(*batch if isinstance(batch, (tuple, list)) else (batch,))
