"""Parameters that have statistics, by name and by (module, name)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from torch import nn

from distprune._common.collectives import Communicator
from distprune._common.naming import NamedParameter, unwrap
from distprune.call.request import ParameterArguments
from distprune.shards.parameters import Target
from distprune.statistics.layers import WeightLayout

Pairs = Iterable[tuple[nn.Module, str]]


class OfParameter(Protocol):
    """The statistics of one parameter."""

    @property
    def label(self) -> str:
        """Its name, for messages."""
        ...

    @property
    def places(self) -> tuple[tuple[nn.Module, str], ...]:
        """Its (module, name) pairs on this rank."""
        ...

    @property
    def layout(self) -> WeightLayout:
        """How the weight lies."""
        ...


T = TypeVar("T")
S = TypeVar("S", bound=OfParameter)


class StatisticsOfParameters(Generic[S]):
    """Statistics of some parameters, and the ranks that have them together.

    Args:
        communicator: all ranks that take part.
        arguments: the parameters, as the caller gave them.
        targets: as they were read: the same list on all ranks.
        local: the statistics of each.
    """

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
