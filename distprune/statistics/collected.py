"""Collecting sums of what layers are called with, and summing them up over all ranks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from distprune._common.collectives import Communicator
from distprune._common.naming import NamedParameter
from distprune._common.process_groups import world
from distprune._common.report_text import listed
from distprune._common.selecting import check_pattern, matcher
from distprune.call.reading import read_parameters
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.statistics_file import MODES
from distprune.shards.parameters import Target
from distprune.statistics.collecting import Collector, LocalStatistics
from distprune.statistics.input_parts import Part, peers_of
from distprune.statistics.layers import WeightLayout, layout_of, refusal
from distprune.statistics.totals import Pairs, StatisticsOfParameters, Totals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Mode = Literal["one_pass", "sequential"]

# Squares on ranks with the same tokens are equal, unless their kernels add in another order.
_TOLERANCE = 1e-6


class CollectedInputs(StatisticsOfParameters[LocalStatistics, Totals]):
    """Sums of the inputs of layers; see :class:`ActivationStatistics`."""

    TOTALS, MODE_KEY, MODES = Totals, "mode", MODES

    def __init__(
        self,
        parameters: Pairs,
        *,
        group: ProcessGroup | None = None,
        pipeline_parallel: bool = False,
        allow_empty: str | Sequence[str] = (),
    ) -> None:
        communicator = world(group)

        def arguments() -> ParameterArguments:
            patterns = [allow_empty] if isinstance(allow_empty, str) else list(allow_empty)
            self._allow_empty = patterns
            return ParameterArguments(
                parameters=list(parameters),
                pipeline_parallel=pipeline_parallel,
                facts=[("allow_empty", str(patterns))],
            )

        with communicator.exclusively():
            read, targets = read_parameters(arguments, communicator)
            local = local_statistics(targets, communicator)
            super().__init__(communicator, read, targets, local)
            communicator.run(self._check_patterns)
        self._collector = self._new_collector()
        self._mode: Mode = "one_pass"

    def _new_collector(self) -> Collector:
        return Collector()

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

        A call of a module that raises does not count, and nothing in it does: after a caught
        out-of-memory error go on with smaller batches. What is called by hand, module after module,
        is one batch inside of :meth:`batch`.

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
                "these statistics are sequential: the inputs of one pass would mix with those of "
                "pruned blocks. Expected new ActivationStatistics for each."
            )
        with self._communicator.raising_everywhere(), self._collector.collecting(self._local):
            yield

    def batch(self, attention_mask: Tensor | None = None) -> AbstractContextManager[None]:
        """One batch, without its padding: a context around its forward, or its forwards.

        If the context ends with an error, nothing of the batch counts.

        Args:
            attention_mask: bool or integers [batch, tokens] of this rank's batch, 0 = padding.
                Layers may see [batch, tokens, features] or [batch * tokens, features]. None: all
                tokens count.

        Raises:
            TypeError: no plain tensor.
            ValueError: another dtype or shape; in the forward, a layer whose input does not fit.
            NotImplementedError: in the forward, a convolution, or fused experts if only a part of
                the batch is padding.
        """
        return self._collector.batch(attention_mask)

    def num_tokens(self, parameters: Pairs | None = None) -> dict[str, int | tuple[int, ...]]:
        """How many tokens each parameter has seen, by its name. Collective.

        Of fused experts it is a tuple: how many came to each expert.

        Raises, Cost: as :meth:`totals`.
        """
        return {label: totals.num_tokens for label, totals in self._labelled(parameters).items()}

    def totals(self, parameters: Pairs | None = None) -> dict[NamedParameter, Totals]:
        """The sums over all ranks, bit-equal on all of them. Collective.

        Args:
            parameters: some of the parameters; by default all.

        Raises:
            ValueError: a layer that was not called, and is not among ``allow_empty``; sums that
                are not finite; ranks of a tensor-parallel group with different inputs.

        Cost: all-reduces of 40 bytes and of 16 bytes per parameter; and, for parameters of which
        something is new, one of 16 bytes per input feature and about 32 per parameter.
        """
        return self._by_pair(self._labelled(parameters))

    def _begin_with(self, mode: str, totals: Mapping[str, Totals]) -> None:
        for parameter in self._local:
            parameter.begin_with(totals[parameter.label])
        self._collector.forwards.problem = None
        self._mode = "sequential" if mode == "sequential" else "one_pass"

    def _read_weights(self) -> list[Target]:
        """The parameters as they are now, in the order of the statistics. Collective."""
        _, targets = read_parameters(lambda: self._arguments, self._communicator)
        assert [t.label for t in targets] == [parameter.label for parameter in self._local]
        return targets

    def _labelled(self, parameters: Pairs | None) -> dict[str, Totals]:
        """Statistics by label, of the parameters that any rank asks for; sums up what is new."""

        def flags() -> Tensor:
            if self._collector.forwards.problem is not None:
                raise self._collector.forwards.problem
            asked = torch.zeros(len(self._local), dtype=torch.int64)
            asked[self._positions_of(parameters)] = 1
            is_new = [int(parameter.summed is None) for parameter in self._local]
            return torch.cat([asked, torch.tensor(is_new)])

        with self._communicator.exclusively():
            shared = self._communicator.max(self._communicator.run(flags)).view(2, -1).bool()
            asked, new = (
                [self._local[position] for position in which.nonzero().view(-1).tolist()]
                for which in (shared[0], shared[0] & shared[1])
            )
            if new:
                same_tokens = self._collector.same_tokens
                sum_over_ranks(new, same_tokens, self._allow_empty, self._communicator)
        return {parameter.label: parameter.summed for parameter in asked if parameter.summed}

    def _check_patterns(self) -> None:
        for pattern in self._allow_empty:
            check_pattern(pattern)
            if not any(map(matcher(pattern), (parameter.label for parameter in self._local))):
                raise ValueError(
                    f"allow_empty: {pattern!r} matches no parameter; expected globs or 're:' "
                    f"patterns for names such as {self._local[0].label}."
                )


def local_statistics(
    targets: Sequence[Target], communicator: Communicator
) -> list[LocalStatistics]:
    """Empty statistics of parameters; of those too that only other ranks have.

    Args:
        targets: as read_parameters returns them: the same list on all ranks.
        communicator: all ranks that take part.

    Raises:
        NotImplementedError: a parameter of a layer whose inputs are not known; on every rank.

    Cost: two all-reduces, of 16 bytes per rank, and of about 100 bytes per parameter.
    """

    def describe() -> str:
        described, obstacles = {}, {}
        for target in targets:
            found = [layout_of(*place, target.shard.shape) for place in target.places]
            layouts = [layout for layout in found if not isinstance(layout, str)]
            if len(layouts) < len(found):
                obstacles[target.label] = next(text for text in found if isinstance(text, str))
                continue
            if any(layout != layouts[0] for layout in layouts[1:]):
                raise NotImplementedError(
                    f"{target.label} is tied between layers that use it differently; expected "
                    "layers of one kind."
                )
            if layouts:
                described[target.label] = (vars(layouts[0]), len(layouts))
        if obstacles:
            raise refusal(obstacles)
        return json.dumps(described)

    texts, _ = communicator.distinct_texts(communicator.run(describe))
    known: dict[str, tuple[WeightLayout, int]] = {}
    for text in texts:
        for label, (layout, num_places) in json.loads(text).items():
            read = WeightLayout(**layout | {"shape": tuple(layout["shape"])}), num_places
            if known.setdefault(label, read) != read:
                raise ValueError(
                    f"{label}: the ranks have different layers of this name ({known[label]}; and "
                    f"{read}); expected the same, or names that tell them apart."
                )
    return [
        LocalStatistics(target.label, target.places, layout, [0] * num_places)
        for target in targets
        for layout, num_places in (known[target.label],)
    ]


def sum_over_ranks(
    parameters: Sequence[LocalStatistics],
    same_tokens: set[tuple[int, ...]],
    allow_empty: Sequence[str],
    communicator: Communicator,
) -> None:
    """Sum up what all ranks have seen, and note it in ``summed``. Collective.

    Of ranks that run the model on the same tokens one counts; the others are compared with it.

    Args:
        parameters: the same on every rank.
        same_tokens: ranks with the same tokens as this one, of each layer.
        allow_empty: patterns of parameters that may have seen no token.
        communicator: all ranks that take part.

    Raises:
        ValueError: a layer that was not called; sums that are not finite; ranks of a
            tensor-parallel group that ran on different tokens. On every rank.

    Cost: one all-reduce of 16 bytes per input feature, and 24 and more per parameter and expert.
    """
    # Of each parameter: calls, two numbers that compare peers, tokens, sums and squares.
    sizes = [
        [len(p.calls), 2, p.layout.num_token_counts, 2 * p.layout.num_inputs] for p in parameters
    ]

    def pack() -> Tensor:
        peers = peers_of(same_tokens, communicator.rank)
        return torch.cat([_packed(p, peers, communicator.rank) for p in parameters])

    shared = communicator.reduce_floats(sum(map(sum, sizes)), pack)
    silent, found = [], []
    for parameter, of_row, row in zip(
        parameters, sizes, torch.split(shared, list(map(sum, sizes))), strict=True
    ):
        layout = parameter.layout
        calls, checks, tokens, both = torch.split(row, of_row)
        sums, squares = both.view(2, *layout.input_shape)
        _check(parameter.label, sums, squares, *checks.tolist())
        is_optional = parameter.loaded is not None or any(
            matcher(pattern)(parameter.label) for pattern in allow_empty
        )
        if not is_optional and not bool(calls.all() and tokens.any()):
            silent.append(parameter.label)
        numbers = tuple(map(int, tokens.tolist()))
        num_tokens = numbers if layout.are_experts else numbers[0]
        found.append(Totals(num_tokens, sums.clone(), squares.clone()))
    if silent:
        raise ValueError(
            f"{listed(silent)}: the layer was not called on any rank while statistics "
            "were collected, so nothing is known of its input. Either its weight is used without "
            "calling it (nn.MultiheadAttention): leave it out. Or no token came to "
            'it (an expert): allow_empty="..." gives such parameters scores of zero.'
        )
    for parameter, totals in zip(parameters, found, strict=True):
        parameter.summed = totals.plus(parameter.loaded)


def _packed(parameter: LocalStatistics, peers: tuple[int, ...], rank: int) -> Tensor:
    """What this rank adds of a parameter, in the order that :func:`sum_over_ranks` takes apart."""
    token_check, square_check = 0, 0.0
    tokens = [0] * parameter.layout.num_token_counts
    inputs_per_count = max(1, parameter.layout.num_inputs // max(1, len(tokens)))
    totals = torch.zeros(2, parameter.layout.num_inputs, dtype=torch.float64)
    for part, seen in parameter.seen.items():
        token_ranks, ranks = _ranks_of(part, peers)
        local = seen.totals.cpu()
        # The first of n ranks adds (n - 1) times what each of the others takes away.
        squares = float(local[1].sum())
        square_check += (len(ranks) - 1 if rank == ranks[0] else -1) * squares
        token_check += (len(token_ranks) - 1 if rank == token_ranks[0] else -1) * seen.num_tokens
        if rank == token_ranks[0]:
            tokens[part.features.start // inputs_per_count] += seen.num_tokens
        if rank == ranks[0]:
            totals[:, part.features.start : part.features.stop] += local
    head = [*parameter.calls, token_check, square_check, *tokens]
    return torch.cat([torch.tensor(head, dtype=torch.float64), totals.view(-1)])


def _ranks_of(part: Part, peers: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks with the tokens of a part, and those with the features too; plain ones: peers."""
    return part.token_ranks or peers, part.ranks or peers


def _check(
    label: str, sums: Tensor, squares: Tensor, token_check: float, square_check: float
) -> None:
    if not bool(torch.isfinite(sums).all() and torch.isfinite(squares).all()):
        raise ValueError(
            f"{label}: the sum of its inputs is not finite: a NaN or an infinity was among them. "
            "Expected finite activations. Padding may hold NaN: pass its attention_mask to batch()."
        )
    if token_check or abs(square_check) > _TOLERANCE * float(squares.sum()):
        raise ValueError(
            f"{label}: ranks of one tensor-parallel group saw different inputs; expected the same "
            "batches on all of them, as tensor parallelism needs: split the data by the "
            "data-parallel rank, not by the global rank. A layer that is not parallelised, on a "
            "plain local part of a sequence, is not supported: make its input a DTensor, or leave "
            "it out."
        )
