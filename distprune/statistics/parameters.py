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
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

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

# Of counts, and of second sums, which kernels may add in another order.
_TOLERANCES = torch.tensor([1e-12, 1e-6], dtype=torch.float64)

Pairs = Iterable[tuple[nn.Module, str]]


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
class OfParameter:
    """The statistics of one parameter.

    Attributes:
        label: the parameter's name.
        places: its (module, name) pairs on this rank; empty if only other ranks have it.
        layout: how it lies, and meets its inputs.
        is_new: whether this rank has seen something that is not summed over the ranks yet.
        loaded: of an earlier run, from a file; None if nothing was loaded.
        total: over all ranks, with what was loaded.
    """

    label: str
    places: tuple[tuple[nn.Module, str], ...]
    layout: WeightLayout
    is_new: bool = True
    loaded: Sums | None = None
    total: Sums | None = None

    @property
    def sums(self) -> Sums:
        """The total, which is known."""
        assert self.total is not None
        return self.total

    def set_total(self, new: Sums, before: Sums | None) -> None:
        """Store what the ranks have seen, together with what they had seen before."""
        if before is not None:
            new = Sums(*(mine + its for mine, its in zip(new, before, strict=True)))
        self.total, self.is_new = new, False


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
    _KIND: ClassVar[type[StoredSums]]
    _NOT_FINITE: ClassVar[str]  # what is wrong with sums that are not, and with ranks that differ
    _UNEQUAL: ClassVar[str]

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
        kind: Any = self._KIND
        stored = {
            p.label: kind(p.layout, self._count(p), *(each.numpy() for each in p.sums[1:]))
            for p in self._asked(None)
        }

        def write() -> None:
            self._check_names()
            if self._communicator.index == 0:
                write_statistics(path, self._mode, stored)

        with self._communicator.exclusively():
            self._communicator.run(write)

    def _load(self, path: str, read: Callable[[str], tuple[str, Mapping[str, S]]]) -> None:
        """Take over what a file has of the parameters, and its mode. Collective."""

        def checked() -> tuple[str, list[S]]:
            self._check_names()
            mode, stored = read(path)
            return mode, [_fitting(parameter, stored, path) for parameter in self._local]

        def facts(found: tuple[str, list[S]]) -> list[tuple[str, str]]:
            digest = hashlib.sha256()
            for parameter, stored in zip(self._local, found[1], strict=True):
                digest.update(f"{parameter.label} {stored.count!r}".encode())
                for each in stored.arrays:
                    digest.update(each.tobytes())
            return [("statistics to load", f"{found[0]}, {digest.hexdigest()[:16]}")]

        with self._communicator.exclusively():
            self._mode, found = self._communicator.run(checked, facts)
        for parameter, stored in zip(self._local, found, strict=True):
            counts = torch.tensor(stored.count, dtype=torch.float64).view(-1)
            parameter.loaded = Sums(counts, *map(torch.from_numpy, stored.arrays))
            parameter.set_total(parameter.loaded, None)

    def _count(self, parameter: P) -> Any:
        """How much was seen, as a file has it."""
        raise NotImplementedError

    def _shapes(self, layout: WeightLayout) -> tuple[tuple[int, ...], ...]:
        """The shapes of the sums of a parameter."""
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

    def _sum_over_ranks(
        self, parameters: Sequence[P], pack: Callable[[], list[Tensor]]
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
        shapes = [self._shapes(parameter.layout) for parameter in parameters]
        sizes = [[2, *map(math.prod, of_row)] for of_row in shapes]
        total = self._communicator.reduce_floats(sum(map(sum, sizes)), lambda: torch.cat(pack()))
        rows = torch.split(total, list(map(sum, sizes)))
        found = []
        for parameter, of_row, size, row in zip(parameters, shapes, sizes, rows, strict=True):
            if not bool(row.isfinite().all()):
                raise ValueError(f"{parameter.label}: {self._NOT_FINITE}")
            differences, *parts = torch.split(row, size)
            allowed = torch.stack([parts[0].sum(), parts[2].sum()]) * _TOLERANCES
            if bool((differences.abs() > allowed).any()):
                raise ValueError(f"{parameter.label}: {self._UNEQUAL}")
            found.append(Sums(*(p.reshape(s).clone() for p, s in zip(parts, of_row, strict=True))))
        return found

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
