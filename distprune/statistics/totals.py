"""Statistics of parameters: by name and by (module, name), in files and in state dictionaries."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from distprune._common.collectives import Communicator
from distprune._common.naming import NamedParameter, unwrap
from distprune._common.report_text import listed
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.statistics_file import (
    StoredStatistics,
    StoredSums,
    described_layout,
    make_stored,
    write_statistics,
)
from distprune.shards.parameters import Target
from distprune.statistics.layers import WeightLayout

_VERSION = 1  # of state dictionaries
Pairs = Iterable[tuple[nn.Module, str]]
# How statistics were collected, and those of each parameter.
Read = tuple[str, Mapping[str, StoredSums]]
K = TypeVar("K", bound="TotalsOfAnyKind")


class TotalsOfAnyKind:
    """A count and two sums, fp64, which are the fields of a subclass in this order."""

    STORED: ClassVar[type[StoredSums]]

    @property
    def count(self) -> Any:
        """How much was seen."""
        return next(iter(vars(self).values()))

    @property
    def both(self) -> list[Tensor]:
        """What was added up."""
        return list(vars(self).values())[1:]

    def plus(self: K, other: K | None) -> K:
        """The statistics of all that both have seen."""
        if other is None:
            return self
        counts = self.count, other.count
        count = (
            tuple(map(sum, zip(*counts, strict=True)))
            if isinstance(self.count, tuple)
            else sum(counts)
        )
        make: Callable[..., K] = type(self)
        return make(count, *(one + more for one, more in zip(self.both, other.both, strict=True)))

    def as_stored(self, layout: WeightLayout) -> StoredSums:
        """What a file has of the parameter."""
        return make_stored(self.STORED, layout, self.count, [each.numpy() for each in self.both])

    def as_entry(self, layout: WeightLayout) -> dict[str, Any]:
        """What a state dictionary has of the parameter."""
        sums = zip(self.STORED.KEYS, (each.clone() for each in self.both), strict=True)
        return described_layout(layout) | {self.STORED.COUNT: self.count} | dict(sums)


@dataclass(frozen=True)
class Totals(TotalsOfAnyKind):
    """The statistics of one parameter's inputs over all ranks; equal on all of them.

    Attributes:
        num_tokens: how many inputs were seen; of fused experts, by each of them.
        sums: fp64, of the input shape: the sum of each input feature over all tokens.
        squares: fp64, of the same shape: the sum of its squares.
    """

    num_tokens: int | tuple[int, ...]
    sums: Tensor
    squares: Tensor

    STORED = StoredStatistics


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


T = TypeVar("T")
S = TypeVar("S", bound=OfParameter)


class StatisticsOfParameters(Generic[S, K]):
    """Statistics of some parameters, and the ranks that have them together.

    Args:
        communicator: all ranks that take part.
        arguments: the parameters, as the caller gave them.
        targets: as they were read: the same list on all ranks.
        local: the statistics of each.

    Attributes:
        TOTALS: what is added up of a parameter.
        MODE_KEY, MODES: where a state dictionary says how it was collected, and the answers.
    """

    TOTALS: type[K]
    MODE_KEY: str
    MODES: tuple[str, ...]

    def __init__(
        self,
        communicator: Communicator,
        arguments: ParameterArguments,
        targets: Sequence[Target],
        local: Sequence[S],
    ) -> None:
        self._communicator = communicator
        self._arguments = arguments
        self._local = list(local)
        self._is_named = all(target.is_named or not target.places for target in targets)

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs of this rank that have statistics, under all their names."""
        return [place for parameter in self._local for place in parameter.places]

    @property
    def num_collectives(self) -> int:
        """All-reduces so far."""
        return self._communicator.num_collectives

    @property
    def bytes_sent(self) -> int:
        """Payload of those, per rank."""
        return self._communicator.bytes_sent

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
        totals = self._labelled(None)

        def write() -> None:
            self._check_names()
            if self._communicator.index == 0:
                layouts = self._layouts.items()
                stored = {n: totals[n].as_stored(layout) for n, layout in layouts}
                write_statistics(path, self.mode, stored)

        with self._communicator.exclusively():
            self._communicator.run(write)

    def state_dict(self) -> dict[str, Any]:
        """The statistics as a plain dictionary, equal on all ranks. Collective.

        Raises, Cost: as :meth:`totals`; ValueError for parameters without full names.
        """
        totals = self._labelled(None)
        self._communicator.run(self._check_names)
        parameters = {n: totals[n].as_entry(layout) for n, layout in self._layouts.items()}
        return {"version": _VERSION, self.MODE_KEY: self.mode, "parameters": parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, on any sharding. Collective.

        What was collected before is forgotten.

        Raises:
            ValueError: no such dictionary; a parameter that it does not have, or that has another
                shape; ranks with different ones. Nothing has changed then.
        """
        self._restore_from(lambda: self._read_state(state), "state")

    @property
    def mode(self) -> str:
        """How the statistics were collected."""
        raise NotImplementedError

    def _labelled(self, parameters: Pairs | None) -> Mapping[str, K]:
        """The sums of all ranks by label, of some parameters or of all. Collective."""
        raise NotImplementedError

    def _begin_with(self, mode: str, totals: Mapping[str, K]) -> None:
        """Forget what was collected, and start from statistics of an earlier run."""
        raise NotImplementedError

    def _check_ready(self) -> None:
        """Raise RuntimeError if sums cannot be replaced now."""

    def _restore_from(self, read: Callable[[], Read], where: str) -> None:
        def restore() -> tuple[str, dict[str, K]]:
            self._check_ready()
            self._check_names()
            mode, stored = read()
            check_fit(self._layouts, stored, where)
            found = {label: stored[label] for label in self._layouts}
            sums = {label: map(torch.from_numpy, each.arrays) for label, each in found.items()}
            make: Callable[..., K] = self.TOTALS
            return mode, {n: make(each.count, *sums[n]) for n, each in found.items()}

        def facts(found: tuple[str, dict[str, K]]) -> list[tuple[str, str]]:
            digest = hashlib.sha256()
            for label, totals in found[1].items():
                digest.update(f"{label} {totals.count!r}".encode())
                for each in totals.both:
                    digest.update(each.numpy().tobytes())
            return [("statistics to load", f"{found[0]}, {digest.hexdigest()[:16]}")]

        with self._communicator.exclusively():
            mode, totals = self._communicator.run(restore, facts)
        self._begin_with(mode, totals)

    def _read_state(self, state: object) -> Read:
        """The mode and the statistics in a state dictionary; ValueError if it is none."""
        found = state if isinstance(state, Mapping) else {}
        mode = found.get(self.MODE_KEY)
        if found.get("version") != _VERSION or mode not in self.MODES:
            raise ValueError(
                f"state is no state dictionary of {type(self).__name__} of version {_VERSION}, "
                f"with {self.MODE_KEY} {' or '.join(map(repr, self.MODES))} (it has {mode!r}); "
                "expected what state_dict() returns."
            )
        kind, stored = self.TOTALS.STORED, {}
        for name, entry in found["parameters"].items():
            sums = [entry[key].detach().double().cpu().numpy().copy() for key in kind.KEYS]
            layout = WeightLayout(entry["layout"], tuple(entry["shape"]), int(entry["groups"]))
            stored[name] = make_stored(kind, layout, entry[kind.COUNT], sums)
        return str(mode), stored

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
