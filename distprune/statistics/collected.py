"""Collecting sums of what layers are called with, and summing them up over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn

from distprune._common.naming import NamedParameter, unwrap
from distprune._common.patterns import check_pattern, matcher
from distprune._common.process_groups import world
from distprune.call.reading import read_parameters
from distprune.call.request import ParameterArguments
from distprune.shards.target import Target
from distprune.statistics.collecting import Collector, LocalStatistics
from distprune.statistics.totals import Totals, local_statistics, sum_over_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

Mode = Literal["one_pass", "sequential"]
Pairs = Iterable[tuple[nn.Module, str]]


class CollectedInputs:
    """Sums of the inputs of layers; see :class:`ActivationStatistics`."""

    def __init__(
        self,
        parameters: Pairs,
        *,
        group: ProcessGroup | None = None,
        pipeline_parallel: bool = False,
        allow_empty: str | Sequence[str] = (),
    ) -> None:
        self._communicator = world(group)
        self._pairs: list[tuple[nn.Module, str]] = []
        self._pipeline_parallel = pipeline_parallel
        self._allow_empty: list[str] = []

        def arguments() -> ParameterArguments:
            self._pairs.extend(parameters)
            self._allow_empty.extend([allow_empty] if isinstance(allow_empty, str) else allow_empty)
            return self._arguments()

        with self._communicator.exclusively():
            _, targets = read_parameters(arguments, self._communicator)
            self._local = local_statistics(targets, self._communicator)
            self._communicator.run(self._check_patterns)
        self._is_named = all(target.is_named or not target.places for target in targets)
        self._position = {
            (id(module), name): position
            for position, parameter in enumerate(self._local)
            for module, name in parameter.places
        }
        self._collector = Collector()
        # Of all ranks together: read from a file, and summed up when they were last asked for.
        self._loaded: list[Totals | None] = [None] * len(self._local)
        self._summed: list[Totals | None] = [None] * len(self._local)
        self._mode: Mode = "one_pass"

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs of this rank that have statistics, under all their names."""
        return [place for parameter in self._local for place in parameter.places]

    @property
    def mode(self) -> Mode:
        """How the statistics were collected.

        "one_pass": the inputs of all layers in one run of the model. "sequential": block after
        block, where the blocks before were pruned already, as Wanda was published.
        """
        return self._mode

    @property
    def num_collectives(self) -> int:
        """All-reduces so far."""
        return self._communicator.num_collectives

    @property
    def bytes_sent(self) -> int:
        """Payload of those, per rank."""
        return self._communicator.bytes_sent

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

    def _begin_sequential(self, blocks: Sequence[nn.Module]) -> list[list[LocalStatistics]]:
        """Check that nothing was collected yet, and list the parameters of each block.

        Raises:
            NotImplementedError: parameters of pipeline stages.
            RuntimeError: something was collected before.
            ValueError: a parameter in no block, or in two.
        """
        if self._pipeline_parallel:
            raise NotImplementedError(
                "pipeline_parallel=True: the ranks have different blocks; expected every block on "
                "every rank. Collect in one pass instead."
            )
        if self._mode == "sequential" or any(
            local.calls != [0] * len(local.calls) or loaded is not None
            for local, loaded in zip(self._local, self._loaded, strict=True)
        ):
            raise RuntimeError(
                "something was collected already; expected new ActivationStatistics, or the inputs "
                "of one pass would mix with those of pruned blocks."
            )
        inside = [{id(module) for module in block.modules()} for block in blocks]
        of_block: list[list[LocalStatistics]] = [[] for _ in blocks]
        for parameter in self._local:
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

    def _by_pair(self, by_label: Mapping[str, T]) -> dict[NamedParameter, T]:
        """What belongs to parameters of this rank, by (module, name)."""
        return {
            NamedParameter(*parameter.places[0], parameter.label): by_label[parameter.label]
            for parameter in self._local
            if parameter.label in by_label and parameter.places
        }

    def _read_weights(self) -> list[Target]:
        """The parameters as they are now, in the order of the statistics. Collective."""
        _, targets = read_parameters(self._arguments, self._communicator)
        assert [t.label for t in targets] == [parameter.label for parameter in self._local]
        return targets

    def _arguments(self) -> ParameterArguments:
        return ParameterArguments(
            parameters=self._pairs,
            pipeline_parallel=self._pipeline_parallel,
            facts=[("allow_empty", str(self._allow_empty))],
        )

    def _labelled(self, parameters: Pairs | None) -> dict[str, Totals]:
        """Statistics by label, of the parameters that any rank asks for."""
        with self._communicator.exclusively():
            positions = self._sum_up(parameters)
        labelled = {}
        for position in positions:
            totals = self._summed[position]
            assert totals is not None
            labelled[self._local[position].label] = totals
        return labelled

    def _sum_up(self, parameters: Pairs | None) -> list[int]:
        """Sum up what is asked for and new; the positions of all that is asked for."""
        size = len(self._local)

        def flags() -> Tensor:
            if self._collector.forwards.problem is not None:
                raise self._collector.forwards.problem
            asked = torch.zeros(size, dtype=torch.int64)
            asked[self._positions_of(parameters)] = 1
            stale = [
                int(local.is_changed or totals is None)
                for local, totals in zip(self._local, self._summed, strict=True)
            ]
            return torch.cat([asked, torch.tensor(stale, dtype=torch.int64)])

        asked, stale = self._communicator.max(self._communicator.run(flags)).view(2, -1)
        positions: list[int] = asked.nonzero().view(-1).tolist()
        new = (asked * stale).nonzero().view(-1).tolist()
        loaded = [self._loaded[position] is not None for position in new]
        if new:
            totals = sum_over_ranks(
                [self._local[position] for position in new],
                [self._local[p].label for p, known in zip(new, loaded, strict=True) if known],
                self._collector.groups,
                self._allow_empty,
                self._communicator,
            )
            for position, total in zip(new, totals, strict=True):
                self._summed[position] = total.plus(self._loaded[position])
                self._local[position].is_changed = False
        return positions

    def _positions_of(self, parameters: Pairs | None) -> list[int]:
        if parameters is None:
            return list(range(len(self._local)))
        positions = []
        for module, name in parameters:
            position = self._position.get((id(unwrap(module)), name))
            if position is None:
                raise ValueError(
                    f"({type(module).__name__}, {name!r}) is none of the parameters of these "
                    "statistics; expected pairs that they were made with."
                )
            positions.append(position)
        return positions

    def _check_patterns(self) -> None:
        for pattern in self._allow_empty:
            check_pattern(pattern)
            if not any(map(matcher(pattern), (parameter.label for parameter in self._local))):
                raise ValueError(
                    f"allow_empty: {pattern!r} matches no parameter; expected globs or 're:' "
                    f"patterns for names such as {self._local[0].label}."
                )

    def _check_names(self) -> None:
        if not self._is_named:
            raise ValueError(
                "parameters have no full names, by which statistics are stored; expected pairs as "
                "select(model) lists them, or NamedParameter(module, name, fqn)."
            )

    def _restore(self, totals: Mapping[str, Totals], mode: Mode) -> None:
        """Start from statistics that were collected before."""
        for position, parameter in enumerate(self._local):
            parameter.forget()
            self._loaded[position] = totals[parameter.label]
            self._summed[position] = totals[parameter.label]
        self._collector.forwards.problem = None
        self._mode = mode
