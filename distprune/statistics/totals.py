"""Statistics of parameters: by name and by (module, name), and in files."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from distprune.base.naming import NamedParameter, unwrap
from distprune.base.report_text import listed
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.statistics_file import (
    StoredStatistics,
    StoredSums,
    write_statistics,
)
from distprune.ranks.collectives import Communicator
from distprune.shards.parameters import Target
from distprune.statistics.layers import WeightLayout

Pairs = Iterable[tuple[nn.Module, str]]
T = TypeVar("T")
Stored = TypeVar("Stored", bound=StoredSums)


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

    def plus(self, other: Totals | None) -> Totals:
        """The statistics of all that both have seen."""
        if other is None:
            return self
        mine, its = self.num_tokens, other.num_tokens
        if isinstance(mine, tuple) and isinstance(its, tuple):
            count: int | tuple[int, ...] = tuple(map(sum, zip(mine, its, strict=True)))
        else:
            count = mine + its  # type: ignore[operator]
        return Totals(count, self.sums + other.sums, self.squares + other.squares)

    def as_stored(self, layout: WeightLayout) -> StoredStatistics:
        """What a file has of the parameter."""
        return StoredStatistics(layout, self.num_tokens, self.sums.numpy(), self.squares.numpy())


@dataclass
class OfParameter:
    """The statistics of one parameter, in the fields of a subclass.

    Attributes:
        label: the parameter's name, for messages.
        places: its (module, name) pairs on this rank; empty if only other ranks have it.
        layout: how it lies, and meets its inputs.
    """

    label: str
    places: tuple[tuple[nn.Module, str], ...]
    layout: WeightLayout


class StatisticsOfParameters:
    """Statistics of some parameters, and the ranks that have them together.

    Args:
        communicator: all ranks that take part.
        arguments: the parameters, as the caller gave them.
        targets: as they were read: the same list on all ranks.
        local: the statistics of each.
    """

    _local: Sequence[OfParameter]
    _mode: str

    def __init__(
        self,
        communicator: Communicator,
        arguments: ParameterArguments,
        targets: Sequence[Target],
        local: Sequence[OfParameter],
    ) -> None:
        self._communicator = communicator
        self._arguments = arguments
        self._local = local
        self._is_named = all(target.is_named or not target.places for target in targets)

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs of this rank that have statistics, under all their names."""
        return [place for parameter in self._local for place in parameter.places]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to one small safetensors file. Collective; the first rank writes.

        It has the sums over all ranks of the whole weights, by full names: any run on any sharding
        can load it. The form is in files.checkpoints.statistics_file.[Note: statistics file]. An
        existing file is replaced at the end, or stays as it was.

        Raises:
            ValueError: as :meth:`totals`; parameters without full names.
            RuntimeError: as :meth:`totals`.
            OutputError: of distprune.files.errors, the file cannot be written; a RuntimeError on
                the other ranks.

        Cost: as :meth:`totals`; 8 bytes for each number of the sums on disk.
        """
        stored = self._stored()

        def write() -> None:
            self._check_names()
            if self._communicator.index == 0:
                write_statistics(path, self._mode, stored)

        with self._communicator.exclusively():
            self._communicator.run(write)

    def _stored(self) -> Mapping[str, StoredSums]:
        """What a file has, by label. Collective."""
        raise NotImplementedError

    def _read(
        self, read: Callable[[], tuple[str, Mapping[str, Stored]]], where: str
    ) -> tuple[str, Mapping[str, Stored]]:
        """How the statistics in a file were collected, and those of the parameters. Collective."""

        def checked() -> tuple[str, Mapping[str, Stored]]:
            self._check_names()
            mode, stored = read()
            check_fit(self._layouts, stored, where)
            return mode, stored

        def facts(found: tuple[str, Mapping[str, Stored]]) -> list[tuple[str, str]]:
            digest = hashlib.sha256()
            for label in self._layouts:
                stored = found[1][label]
                digest.update(f"{label} {stored.count!r}".encode())
                for each in stored.arrays:
                    digest.update(each.tobytes())
            return [("statistics to load", f"{found[0]}, {digest.hexdigest()[:16]}")]

        with self._communicator.exclusively():
            return self._communicator.run(checked, facts)

    @property
    def _layouts(self) -> dict[str, WeightLayout]:
        return {parameter.label: parameter.layout for parameter in self._local}

    def _by_pair(self, by_label: Mapping[str, T]) -> dict[NamedParameter, T]:
        """What belongs to parameters of this rank, by (module, name)."""
        return {
            NamedParameter(*parameter.places[0], parameter.label): by_label[parameter.label]
            for parameter in self._local
            if parameter.label in by_label and parameter.places
        }

    def _positions_of(self, parameters: Pairs | None) -> list[int]:
        if parameters is None:
            return list(range(len(self._local)))
        own = {
            (id(module), name): position
            for position, parameter in enumerate(self._local)
            for module, name in parameter.places
        }
        positions = []
        for module, name in parameters:
            position = own.get((id(unwrap(module)), name))
            if position is None:
                raise ValueError(
                    f"({type(module).__name__}, {name!r}) is none of the parameters of these "
                    "statistics; expected pairs that they were made with."
                )
            positions.append(position)
        return positions

    def _check_names(self) -> None:
        if not self._is_named:
            raise ValueError(
                "parameters have no full names, by which statistics are stored; expected pairs as "
                "select(model) lists them, or NamedParameter(module, name, fqn)."
            )


def check_fit(
    layouts: Mapping[str, WeightLayout], stored: Mapping[str, StoredSums], where: str
) -> None:
    """Check that stored statistics are those of some parameters.

    Args:
        layouts: of the parameters that are needed, by name.
        stored: by name; more than is needed does no harm.
        where: they are stored, for messages.

    Raises:
        ValueError: statistics of a parameter are missing, or are those of another weight.
    """
    missing = [label for label in layouts if label not in stored]
    if missing:
        raise ValueError(
            f"{where} has no statistics of {listed(missing)}; it has those of "
            f"{', '.join(list(stored)[:3])}{', ...' if len(stored) > 3 else ''}. Expected the full "
            "names of the model that they were collected on."
        )
    for label, layout in layouts.items():
        found = stored[label].layout
        if found != layout:
            raise ValueError(
                f"{label}: {where} has statistics of a weight of shape "
                f"{found.shape} ({found.kind}, {found.groups} groups); expected "
                f"{layout.shape} ({layout.kind}, {layout.groups} groups)."
            )


def warn_of_empty(by_label: Mapping[str, Totals], communicator: Communicator) -> None:
    """Warn, on the first rank, of parameters and experts that saw no token: scores of zero."""
    empty = []
    for label, totals in by_label.items():
        if isinstance(totals.num_tokens, int):
            empty += [] if totals.num_tokens else [label]
        elif not all(totals.num_tokens):
            empty.append(named_experts(totals.num_tokens, label))
    warn_of_zero_scores("no token came to", empty, "text", communicator, stacklevel=5)


def named_experts(counts: Sequence[int], label: str) -> str:
    """The experts of a parameter whose count is 0, in words."""
    experts = [str(number) for number, count in enumerate(counts) if not count]
    return f"{'experts' if len(experts) > 1 else 'expert'} {listed(experts, 8)} of {label}"


def warn_of_zero_scores(
    why: str, labels: Sequence[str], more: str, communicator: Communicator, stacklevel: int
) -> None:
    """Warn, on the first rank, of parameters and experts whose scores are all zero, if any."""
    if labels and communicator.index == 0:
        warnings.warn(
            f"{why} {listed(labels, separator='; ')}: all their scores are zero, so that they are "
            f"pruned first, in the order of their elements. Collect statistics of more {more}, or "
            "leave them out.",
            stacklevel=stacklevel,
        )
