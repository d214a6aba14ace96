"""What a budget is: a rule that divides the pruned elements of a call among its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from distprune._common.amount import Bounded, Bounds
from distprune._common.collectives import Reducer
from distprune.budgets.filling import Line, NoLevelError, fill, rounded
from distprune.selection.candidates import Candidates
from distprune.selection.keys import KeyRange


@dataclass(frozen=True)
class Ranked:
    """What a call ranks, for budgets that depend on scores.

    Attributes:
        parts: this rank's part of every parameter, in the same order on all ranks.
        num_live: unpruned elements of every whole parameter.
        keys: the range of all keys.
        communicator: the ranks that have the parts.
    """

    parts: Sequence[Candidates]
    num_live: Sequence[int]
    keys: KeyRange
    communicator: Reducer


@dataclass(frozen=True)
class Counts:
    """How many elements of every whole parameter are pruned after a call.

    Attributes:
        counts: per parameter; their sum is the total that was asked for.
        wanted: per parameter, the sparsity that the budget gives it where nothing else limits it.
    """

    counts: tuple[int, ...]
    wanted: tuple[float, ...]


class Division(ABC):
    """A budget that is settled for the parameters of a call."""

    @property
    def facts(self) -> Sequence[tuple[str, str]]:
        """(label, text) pairs that must be equal on all ranks."""
        return ()

    @abstractmethod
    def counts(self, total: int, limits: Bounds, ranked: Ranked) -> Counts:
        """Divide ``total`` pruned elements among the parameters. Collective.

        Args:
            total: pruned elements of all parameters after the call.
            limits: of each parameter: what is pruned already, floors and ceilings included. They
                allow for the total.
            ranked: what the call ranks.
        """

    def own_total(self, limits: Bounds) -> int | None:
        """The total that the budget itself gives, within limits; None if it needs an amount."""
        return None


class Budget(ABC):
    """A rule for ``budget=``: how the pruned elements of a call are divided among its parameters.

    Every budget gives exact counts whose sum is the number of elements that the call's amount
    asks for: see the classes of :mod:`distprune.budgets`.
    """

    def __repr__(self) -> str:
        """The same on all ranks: they compare it."""
        return f"{type(self).__name__}()"

    @property
    def gives_total(self) -> bool:
        """Whether a call needs no amount, because the budget gives the total itself."""
        return False

    @abstractmethod
    def divide(self, parameters: Sequence[Bounded]) -> Division:
        """Settle the rule for the parameters of a call; a local step.

        Raises:
            ValueError, TypeError: the budget does not fit the parameters.
        """


@dataclass(frozen=True)
class LinearDivision(Division):
    """A rule of lines: see filling.py. It reads no element, and sends nothing.

    Attributes:
        parameters: of the call.
        lines: the rule.
        caps: per parameter, how many elements the rule prunes at most.
    """

    name: str
    parameters: tuple[Bounded, ...]
    lines: tuple[Line, ...]
    caps: tuple[int, ...]

    @property
    def facts(self) -> Sequence[tuple[str, str]]:
        return [
            (f"budget of {parameter.label}", f"{line.start} + {line.slope} per level, <= {cap}")
            for parameter, line, cap in zip(self.parameters, self.lines, self.caps, strict=True)
        ]

    def counts(self, total: int, limits: Bounds, ranked: Ranked) -> Counts:
        return self.divided(total, limits)

    def divided(self, total: int, limits: Bounds) -> Counts:
        """:meth:`counts`, which depend on no score here; a local step."""
        sizes = [parameter.num_elements for parameter in self.parameters]
        wanted = self._filled([0] * len(sizes), self.caps, total)
        counts = self._filled(limits.lowest, self._capped(limits), total)
        return Counts(
            tuple(rounded(counts, total)),
            tuple(float(w / n) if n else 0.0 for w, n in zip(wanted, sizes, strict=True)),
        )

    def _capped(self, limits: Bounds) -> list[int]:
        """The highest counts: what is pruned already, and floors, are stronger than caps."""
        return [
            max(low, min(high, cap))
            for low, high, cap in zip(limits.lowest, limits.highest, self.caps, strict=True)
        ]

    def _filled(self, lowest: Sequence[int], highest: Sequence[int], total: int) -> list[Fraction]:
        try:
            return fill(self.lines, lowest, highest, total)
        except NoLevelError as error:
            low, high = int(error.lowest), int(error.highest)
            raise ValueError(
                f"{self.name} can divide {low:,} to {high:,} pruned elements among these "
                f"parameters, and {total:,} are to be pruned after the call, those included that "
                "are pruned already. Expected an amount within these; change it, or the budget."
            ) from None
