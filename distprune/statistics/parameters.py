"""What all statistics have in common: parameters, sums over the ranks, and files.

A parameter that several ranks have is seen in parts, and ranks that run the same data see the same.
So each kind of statistics is one fp64 vector for each parameter, to which every rank adds what is
its own; :func:`sum_over_ranks` adds these up in one all-reduce.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from distprune.base.naming import NamedParameter, unwrap
from distprune.base.report_text import listed
from distprune.call.reading import read_parameters
from distprune.call.request import ParameterArguments
from distprune.files.checkpoints.statistics_file import StoredSums, write_statistics
from distprune.ranks.collectives import Communicator
from distprune.shards.shard import Shard
from distprune.statistics.layers import WeightLayout

Pairs = Iterable[tuple[nn.Module, str]]


class OfParameter(Protocol):
    """The statistics of one parameter.

    Attributes:
        label: the parameter's name.
        places: its (module, name) pairs on this rank; empty if only other ranks have it.
        layout: how it lies, and meets its inputs.
        is_new: whether this rank has seen something that is not summed over the ranks yet.
    """

    label: str
    places: tuple[tuple[nn.Module, str], ...]
    layout: WeightLayout
    is_new: bool


P = TypeVar("P", bound=OfParameter)
S = TypeVar("S", bound=StoredSums)
V = TypeVar("V")


class Statistics(Generic[P]):
    """Statistics of some parameters, and the ranks that have them together.

    Args:
        communicator: all ranks that take part.
        arguments: makes the arguments of the caller.
        layout_of: of a parameter at one of its places; raises if it is not known.
        make: the empty statistics of a parameter.
    """

    _mode: str

    def __init__(
        self,
        communicator: Communicator,
        arguments: Callable[[], ParameterArguments],
        layout_of: Callable[[Shard, nn.Module, str], WeightLayout],
        make: Callable[[str, tuple[tuple[nn.Module, str], ...], WeightLayout], P],
    ) -> None:
        self._communicator = communicator
        with communicator.exclusively():
            self._arguments, targets = read_parameters(arguments, communicator)
            layouts = _agreed_layouts(targets, layout_of, communicator)
        self._local: list[P] = [make(t.name, t.places, layouts[t.name]) for t in targets]
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
        stored = {parameter.label: self._stored(parameter) for parameter in self._asked(None)}

        def write() -> None:
            self._check_names()
            if self._communicator.index == 0:
                write_statistics(path, self._mode, stored)

        with self._communicator.exclusively():
            self._communicator.run(write)

    def _load(self, path: str, read: Callable[[str], tuple[str, Mapping[str, S]]]) -> dict[str, S]:
        """What a file has of the parameters; takes over its mode. Collective."""

        def checked() -> tuple[str, dict[str, S]]:
            self._check_names()
            mode, stored = read(path)
            return mode, {p.label: _fitting(p, stored, path) for p in self._local}

        def facts(found: tuple[str, dict[str, S]]) -> list[tuple[str, str]]:
            digest = hashlib.sha256()
            for label, stored in found[1].items():
                digest.update(f"{label} {stored.count!r}".encode())
                for each in stored.arrays:
                    digest.update(each.tobytes())
            return [("statistics to load", f"{found[0]}, {digest.hexdigest()[:16]}")]

        with self._communicator.exclusively():
            self._mode, stored = self._communicator.run(checked, facts)
        return stored

    def _stored(self, parameter: P) -> StoredSums:
        """What a file has of a parameter whose sums are known."""
        raise NotImplementedError

    def _check_ready(self) -> None:
        """Raise RuntimeError if sums cannot be asked for on this rank."""

    def _sum(self, parameters: Sequence[P]) -> None:
        """Sum up what is new of some parameters. Collective."""

    def _asked(self, parameters: Pairs | None) -> list[P]:
        """The parameters that any rank asks for; sums up what is new of them. Collective."""

        def flags() -> Tensor:
            self._check_ready()
            flags = torch.zeros(2, len(self._local), dtype=torch.int64)
            flags[0, self._positions_of(parameters)] = 1
            flags[1] = torch.tensor([parameter.is_new for parameter in self._local])
            return flags.view(-1)

        with self._communicator.exclusively():
            asked, new = self._communicator.max(self._communicator.run(flags)).view(2, -1).bool()
            if bool((asked & new).any()):
                self._sum([p for p, is_new in zip(self._local, asked & new, strict=True) if is_new])
        return [p for p, is_asked in zip(self._local, asked, strict=True) if is_asked]

    def _by_pair(self, parameters: Sequence[P], value: Callable[[P], V]) -> dict[NamedParameter, V]:
        """A value of each parameter that this rank has, by (module, name)."""
        return {NamedParameter(*p.places[0], p.label): value(p) for p in parameters if p.places}

    def _targets(self) -> list[Shard]:
        """The parameters as they are now, in the order of the statistics. Collective."""
        _, targets = read_parameters(lambda: self._arguments, self._communicator)
        assert [target.name for target in targets] == [p.label for p in self._local]
        return targets

    def _positions_of(self, parameters: Pairs | None) -> list[int]:
        if parameters is None:
            return list(range(len(self._local)))
        known = {
            (id(module), name): position
            for position, parameter in enumerate(self._local)
            for module, name in parameter.places
        }
        positions = []
        for module, name in parameters:
            position = known.get((id(unwrap(module)), name))
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

    def _warn_of_zeros(
        self, why: str, seen: Iterable[tuple[P, Sequence[Any]]], more: str, stacklevel: int
    ) -> None:
        """Warn, on the first rank, of parameters and experts whose scores are all zero.

        Args:
            why: they are zero.
            seen: by parameter, what each of its matrices has seen; 0 is nothing.
            more: of what statistics should be collected.
            stacklevel: of the warning, for the caller of this method.
        """
        labels = []
        for parameter, counts in seen:
            zero = [str(number) for number, count in enumerate(counts) if not count]
            if len(zero) == len(counts) and not parameter.layout.are_experts:
                labels.append(parameter.label)
            elif zero and parameter.layout.are_experts:
                noun = "experts" if len(zero) > 1 else "expert"
                labels.append(f"{noun} {listed(zero, 8)} of {parameter.label}")
        if labels and self._communicator.index == 0:
            warnings.warn(
                f"{why} {listed(labels, separator='; ')}: all their scores are zero, so that they "
                f"are pruned first, in the order of their elements. Collect statistics of more "
                f"{more}, or leave them out.",
                stacklevel=stacklevel + 1,
            )


def sum_over_ranks(
    sizes: Sequence[int], pack: Callable[[], list[Tensor]], communicator: Communicator
) -> tuple[Tensor, ...]:
    """Sum one fp64 vector for each parameter over all ranks. Collective.

    Args:
        sizes: of the vectors, equal on every rank.
        pack: a local step that makes those of this rank.
        communicator: all ranks that take part.

    Cost: one all-reduce of 8 bytes per element.
    """
    total = communicator.reduce_floats(sum(sizes), lambda: torch.cat(pack()))
    return torch.split(total, list(sizes))


def difference_of(value: float, ranks: Sequence[int], rank: int) -> float:
    """What this rank adds to a sum that is 0 if ``value`` is equal on all of ``ranks``."""
    return value * (len(ranks) - 1) if rank == ranks[0] else -value


def peers_of(of_layers: Collection[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """The ranks that run the model on the same data as this one, itself included.

    Args:
        of_layers: the ranks with the same data, as each layer tells.
        rank: this one.

    Returns:
        The most ranks of a layer, if those of all others are among them; else this rank alone.
    """
    largest = max(of_layers, key=len, default=(rank,))
    if rank not in largest or not all(set(ranks) <= set(largest) for ranks in of_layers):
        return (rank,)
    return largest


def _agreed_layouts(
    targets: Sequence[Shard],
    layout_of: Callable[[Shard, nn.Module, str], WeightLayout],
    communicator: Communicator,
) -> dict[str, WeightLayout]:
    """The layouts of all parameters by label, also of those that only other ranks have.

    Cost: two all-reduces, of 16 bytes per rank, and of about 100 bytes per parameter.
    """

    def describe() -> str:
        described: dict[str, dict[str, object]] = {}
        for target in targets:
            layouts = {layout_of(target, module, name) for module, name in target.places}
            if len(layouts) > 1:
                raise NotImplementedError(
                    f"{target.name} is tied between layers that use it differently; expected "
                    "layers of one kind."
                )
            if layouts:
                described[target.name] = vars(layouts.pop())
        return json.dumps(described)

    texts, _ = communicator.distinct_texts(communicator.run(describe))
    known: dict[str, WeightLayout] = {}
    for text in texts:
        for label, fields in json.loads(text).items():
            layout = WeightLayout(**fields | {"shape": tuple(fields["shape"])})
            if known.setdefault(label, layout) != layout:
                raise ValueError(
                    f"{label}: the ranks have different layers of this name ({known[label]}; and "
                    f"{layout}); expected the same, or names that tell them apart."
                )
    return known


def _fitting(parameter: OfParameter, stored: Mapping[str, S], where: str) -> S:
    """The stored statistics of a parameter.

    Raises:
        ValueError: they are missing, or are those of another weight.
    """
    label, layout = parameter.label, parameter.layout
    if label not in stored:
        raise ValueError(
            f"{where} has no statistics of {label}; it has those of {listed(stored, 3)}. Expected "
            "the full names of the model that they were collected on."
        )
    found = stored[label].layout
    if found != layout:
        raise ValueError(
            f"{label}: {where} has statistics of a weight of shape {found.shape} ({found.kind}, "
            f"{found.groups} groups); expected {layout.shape} ({layout.kind}, {layout.groups} "
            "groups)."
        )
    return stored[label]
