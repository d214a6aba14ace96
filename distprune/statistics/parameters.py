"""What all statistics have in common: parameters, sums over the ranks, and files.

A parameter that several ranks have is seen in parts, and ranks that run the same data see the same.
So each kind of statistics is one fp64 vector for each parameter, to which every rank adds what is
its own, and one all-reduce adds these up.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from distprune.base.amount import listed
from distprune.base.blocks import WeightLayout
from distprune.base.naming import NamedParameter, unwrap
from distprune.call.reading import read_parameters
from distprune.call.request import ParameterArguments
from distprune.files.statistics_file import (
    StoredStatistics,
    read_statistics,
    scored_as_siblings,
    write_statistics,
)
from distprune.ranks.collectives import Communicator
from distprune.shards.factored import FactoredScores
from distprune.shards.shard import Shard

# Of counts, and of second sums, which kernels may add in another order.
_TOLERANCES = torch.tensor([1e-12, 1e-6], dtype=torch.float64)

Pairs = Iterable[tuple[nn.Module, str]]
S = TypeVar("S", bound="Statistics")
V = TypeVar("V")


class Sums(NamedTuple):
    """What was seen of a parameter: fp64, equal on all ranks.

    Attributes:
        counts: [1], how much was seen; or [experts], of each of fused experts.
        first, second: what was added up, in the shapes that a file has.
    """

    counts: Tensor
    first: Tensor
    second: Tensor


@dataclass(eq=False)
class Entry:
    """The statistics of one parameter.

    Attributes:
        label: the parameter's name.
        places: its (module, name) pairs on this rank; empty if only other ranks have it.
        layout: how it lies, and meets its inputs.
        seen: what this rank has seen of its inputs since the ranks have summed up: by part, the
            number of tokens and the sums.
        total: over all ranks, with what was loaded; None if nothing was summed up yet.
    """

    label: str
    places: tuple[tuple[nn.Module, str], ...]
    layout: WeightLayout
    seen: dict[Any, tuple[int | Tensor, Tensor]] = field(default_factory=dict)
    total: Sums | None = None

    @property
    def sums(self) -> Sums:
        """The total, which is known."""
        assert self.total is not None
        return self.total

    def add_to_total(self, new: Sums) -> None:
        """Add what the ranks have seen since the last sum."""
        if self.total is not None:
            new = Sums(*(mine + its for mine, its in zip(self.total, new, strict=True)))
        self.total, self.seen = new, {}


class Statistics:
    """Statistics of some parameters, and the ranks that have them together."""

    _mode: str
    _OF_GRADIENTS: ClassVar[bool]
    _NOT_FINITE: ClassVar[str]  # what is wrong with sums that are not, and with ranks that differ
    _UNEQUAL: ClassVar[str]

    def _read(
        self,
        communicator: Communicator,
        arguments: Callable[[], ParameterArguments],
        layout_of: Callable[[Shard, nn.Module, str], WeightLayout],
    ) -> None:
        """Read the parameters. Collective.

        Args:
            communicator: all ranks that take part.
            arguments: makes the arguments of the caller.
            layout_of: of a parameter at one of its places; raises if it is not known.
        """
        self._communicator = communicator
        with communicator.exclusively():
            self._arguments, shards = read_parameters(arguments, communicator)
            layouts = _agreed_layouts(shards, layout_of, communicator)
        self._local = [Entry(s.name, s.places, layouts[s.name]) for s in shards]
        self._is_named = all(shard.is_named or not shard.places for shard in shards)

    @property
    def parameters(self) -> list[tuple[nn.Module, str]]:
        """The (module, name) pairs of this rank that have statistics, under all their names."""
        return [place for parameter in self._local for place in parameter.places]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics to one small safetensors file. Collective; the first rank writes.

        It has the sums over all ranks of the whole weights, by full names: any run on any sharding
        can load it. The form is in files.statistics_file.[Note: statistics file]. An
        existing file is replaced at the end, or stays as it was.

        Raises:
            ValueError: as :meth:`totals`; parameters without full names.
            RuntimeError: as :meth:`totals`.
            OutputError: of distprune.files.errors, the file cannot be written; a RuntimeError on
                the other ranks.

        Cost: as :meth:`totals`; 8 bytes for each number of the sums on disk.
        """
        stored = self._stored(self._asked(None))

        def write() -> None:
            self._check_names()
            if self._communicator.index == 0:
                write_statistics(path, self._mode, stored)

        with self._communicator.exclusively():
            self._communicator.run(write)

    @classmethod
    def load(cls: type[S], path: str | os.PathLike[str], parameters: Pairs, **options: Any) -> S:
        """Statistics of a file that :meth:`save` wrote, for any sharding. Collective.

        Args:
            path: of the file; every rank reads it.
            parameters: as for the class. The file may have statistics of more parameters.
            options: keywords of the class.

        Raises:
            CheckpointError: of distprune.files.errors, no such file, or a malformed one.
            ValueError: a parameter that the file does not have, or that has another shape; ranks
                that read different files.
            NotImplementedError: as the class.

        Cost: a read of the file; all-reduces of some hundred bytes.
        """
        make: Any = cls
        made: S = make(parameters, **options)

        def read() -> tuple[str, list[StoredStatistics]]:
            made._check_names()
            mode, stored = read_statistics(path, cls._OF_GRADIENTS)
            return mode, [_fitting(p, stored, os.fspath(path)) for p in made._local]

        def facts(found: tuple[str, list[StoredStatistics]]) -> list[tuple[str, str]]:
            arrays = [a.tobytes() for stored in found[1] for a in (stored.first, stored.second)]
            digest = hashlib.sha256(b"".join(arrays)).hexdigest()[:16]
            return [
                ("statistics to load", f"{found[0]} {digest} {[each.count for each in found[1]]}")
            ]

        with made._communicator.exclusively():
            made._mode, found = made._communicator.run(read, facts)
        for parameter, stored in zip(made._local, found, strict=True):
            parameter.total = _sums_of(stored)
        return made

    def _stored(self, parameters: Iterable[Entry]) -> dict[str, StoredStatistics]:
        """The statistics of parameters by name, as a file has them."""
        stored = {}
        for p in parameters:
            first, second = p.sums.first.numpy(), p.sums.second.numpy()
            facts = p.layout, self._count(p), first, second, self._OF_GRADIENTS
            stored[p.label] = StoredStatistics(*facts)
        return stored

    def _count(self, parameter: Entry) -> Any:
        """How much was seen, as a file has it."""
        raise NotImplementedError

    def _shapes(self, layout: WeightLayout) -> tuple[tuple[int, ...], ...]:
        """The shapes of the sums of a parameter."""
        raise NotImplementedError

    def _check_ready(self) -> None:
        """Raise RuntimeError if sums cannot be asked for on this rank."""

    def _sum(self, parameters: Sequence[Entry]) -> None:
        """Sum up what is new of some parameters. Collective."""

    def _asked(self, parameters: Pairs | None) -> list[Entry]:
        """The parameters that any rank asks for; sums up what is new of them. Collective."""

        def flags() -> Tensor:
            self._check_ready()
            asked = set(self._entries_of(parameters))
            rows = [(p in asked, bool(p.seen) or p.total is None) for p in self._local]
            return torch.tensor(rows, dtype=torch.int64).view(-1)

        communicator = self._communicator
        with communicator.exclusively():
            rows = communicator.max(communicator.run(flags)).view(-1, 2).tolist()
            pairs = list(zip(self._local, rows, strict=True))
            new = [parameter for parameter, (is_asked, is_new) in pairs if is_asked and is_new]
            if new:
                self._sum(new)
        return [parameter for parameter, (is_asked, _) in pairs if is_asked]

    def _sum_over_ranks(
        self, parameters: Sequence[Entry], pack: Callable[[], list[Tensor]]
    ) -> list[Sums]:
        """Sum one vector for each parameter over all ranks. Collective.

        Args:
            parameters: the same on every rank.
            pack: a local step that makes the vectors of this rank, fp64: two numbers, whose sums
                are 0 if ranks with the same data have seen as much, and have the same second sums;
                then counts, first and second sums.

        Raises:
            ValueError: sums that are not finite; ranks with the same data that differ. On every
                rank.

        Cost: one all-reduce of 8 bytes per element.
        """
        shapes = [((2,), *self._shapes(parameter.layout)) for parameter in parameters]
        sizes = [math.prod(shape) for of_one in shapes for shape in of_one]
        total = self._communicator.reduce_floats(sum(sizes), lambda: torch.cat(pack()))
        parts = iter(torch.split(total, sizes))
        found = []
        for parameter, of_one in zip(parameters, shapes, strict=True):
            differences, *sums = (next(parts).reshape(shape).clone() for shape in of_one)
            if not all(bool(part.isfinite().all()) for part in (differences, *sums)):
                raise ValueError(f"{parameter.label}: {self._NOT_FINITE}")
            allowed = torch.stack([sums[0].sum(), sums[2].sum()]) * _TOLERANCES
            if bool((differences.abs() > allowed).any()):
                raise ValueError(f"{parameter.label}: {self._UNEQUAL}")
            found.append(Sums(*sums))
        return found

    def _by_pair(
        self, parameters: Sequence[Entry], value: Callable[[Entry], V]
    ) -> dict[NamedParameter, V]:
        """A value of each parameter that this rank has, by (module, name)."""
        return {NamedParameter(*p.places[0], p.label): value(p) for p in parameters if p.places}

    def _scores(
        self, parameters: Sequence[Entry], make: Callable[[Entry], FactoredScores]
    ) -> dict[NamedParameter, FactoredScores]:
        """The scores of parameters; the first rank warns of matrices that saw nothing."""
        return self._by_pair(self._without_empty(parameters), make)

    def _without_empty(self, parameters: Sequence[Entry]) -> list[Entry]:
        """Parameters whose empty matrices have the means of their siblings."""
        stored = self._stored(parameters)
        filled, warning = scored_as_siblings(stored)
        if warning is None:
            return list(parameters)
        if self._communicator.index == 0:
            warnings.warn(warning, stacklevel=4)
        return [replace(p, total=_sums_of(filled[p.label])) for p in parameters]

    def _shards(self) -> list[Shard]:
        """The parameters as they are now, in the order of the statistics. Collective."""
        return read_parameters(lambda: self._arguments, self._communicator)[1]

    def _entries_of(self, parameters: Pairs | None) -> list[Entry]:
        if parameters is None:
            return self._local
        known = {(id(module), name): p for p in self._local for module, name in p.places}
        try:
            return [known[id(unwrap(module)), name] for module, name in parameters]
        except KeyError:
            text = "a (module, name) pair is none of the parameters of these statistics"
            raise ValueError(f"{text}; expected pairs that they were made with.") from None

    def _check_names(self) -> None:
        if not self._is_named:
            text = "parameters have no full names, by which statistics are stored"
            raise ValueError(f"{text}; expected pairs as select(model) lists them.")


def _sums_of(stored: StoredStatistics) -> Sums:
    counts = torch.tensor(stored.count, dtype=torch.float64).view(-1)
    return Sums(counts, *map(torch.from_numpy, (stored.first, stored.second)))


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
    shards: Sequence[Shard],
    layout_of: Callable[[Shard, nn.Module, str], WeightLayout],
    communicator: Communicator,
) -> dict[str, WeightLayout]:
    """The layouts of all parameters by label, also of those that only other ranks have.

    Cost: two all-reduces, of 16 bytes per rank, and of about 100 bytes per parameter.
    """

    def describe() -> str:
        described = {}
        for shard in shards:
            layouts = {layout_of(shard, module, name) for module, name in shard.places}
            if len(layouts) > 1:
                raise NotImplementedError(
                    f"{shard.name} is tied between layers that use it differently; expected "
                    "layers of one kind."
                )
            for layout in layouts:
                described[shard.name] = layout.kind, layout.shape, layout.groups
        return json.dumps(described)

    texts, _ = communicator.distinct_texts(communicator.run(describe))
    return {
        label: WeightLayout(kind, tuple(shape), groups)
        for text in texts
        for label, (kind, shape, groups) in json.loads(text).items()
    }


def _fitting(
    parameter: Entry, stored: Mapping[str, StoredStatistics], where: str
) -> StoredStatistics:
    """The stored statistics of a parameter; ValueError if missing, or those of another weight."""
    label, layout = parameter.label, parameter.layout
    if label not in stored:
        raise ValueError(
            f"{where} has no statistics of {label}; it has those of {listed(stored, 3)}."
        )
    if stored[label].layout != layout:
        raise ValueError(
            f"{label}: {where} has statistics of a {stored[label].layout}; expected {layout}."
        )
    return stored[label]
