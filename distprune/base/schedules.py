"""Schedules: the sparsity of a model at each step, as pure functions without a model or a rank.

[Note: steps] Steps are counted from 0, as ``enumerate(loader)`` counts them: the first
``ScheduledPruner.step()`` is step 0. At some steps a pruning is *due*. The sparsity is a share
of all elements of the parameters, each counted once, pruned or not. It holds from a due step until
the next.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from distprune.base.amount import check_share


class Schedule:
    """Base of all schedules: frozen dataclasses that compare equal if their fields do.

    A pruning is due at ``begin``, every ``frequency`` steps, and at ``end`` if there is one.
    """

    begin: int
    end: int | None
    frequency: int

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.end is not None and self.end < self.begin:
            raise ValueError(
                f"end={self.end} comes before begin={self.begin}; expected begin <= end."
            )

    def is_due(self, step: int) -> bool:
        """Whether a pruning is due after optimizer step number ``step`` (from 0)."""
        if step < self.begin or (self.end is not None and step > self.end):
            return False
        return step == self.end or (step - self.begin) % self.frequency == 0

    def sparsity_at(self, step: int) -> float:
        """The share of all elements to be pruned, from ``step`` until the next due step.

        It is 0.0 before the first due step.
        """
        if step < self.begin:
            return 0.0
        last = step - (step - self.begin) % self.frequency
        return self._due_sparsity(last if self.end is None or step < self.end else self.end)

    @property
    def ends_at(self) -> float | None:
        """The final value of :meth:`sparsity_at`; None if it is unknown."""
        return None if self.end is None else self._due_sparsity(self.end)

    def _due_sparsity(self, step: int) -> float:
        """The sparsity at a due step."""
        raise NotImplementedError


@dataclass(frozen=True)
class OneShot(Schedule):
    """Prunes once.

    Args:
        step: the due step, counted from 0.
        sparsity: share of all elements, in [0, 1].

    Raises:
        TypeError, ValueError: a value of a wrong type, or out of range.
    """

    step: int
    sparsity: float
    frequency = 1
    begin = end = property(lambda self: self.step)  # type: ignore[assignment]

    def _due_sparsity(self, step: int) -> float:
        return self.sparsity


@dataclass(frozen=True)
class Linear(Schedule):
    """Raises the sparsity by equal amounts.

    Args:
        begin: first due step; ``initial_sparsity`` holds from this step.
        end: last due step, even if ``end - begin`` is no multiple of ``frequency``;
            ``final_sparsity`` holds exactly from this step. If it equals ``begin``, it is the only
            due step.
        frequency: steps from one due step to the next.
        final_sparsity, initial_sparsity: shares of all elements, in [0, 1], not decreasing.

    Raises:
        TypeError, ValueError: a value of a wrong type, or out of range.
    """

    begin: int
    end: int
    frequency: int
    final_sparsity: float
    initial_sparsity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.initial_sparsity > self.final_sparsity:
            raise ValueError(
                f"initial_sparsity={self.initial_sparsity} is above final_sparsity="
                f"{self.final_sparsity}; expected a sparsity that never decreases."
            )

    def _due_sparsity(self, step: int) -> float:
        # Exact at both ends, regardless of rounding in the formula.
        if step in (self.begin, self.end):
            return self.final_sparsity if step == self.end else self.initial_sparsity
        rise = self.final_sparsity - self.initial_sparsity
        between = self._between(rise, (step - self.begin) / (self.end - self.begin))
        return min(max(between, self.initial_sparsity), self.final_sparsity)

    def _between(self, rise: float, progress: float) -> float:
        """The sparsity at ``progress``, the share of steps from begin to end, in [0, 1)."""
        return self.initial_sparsity + rise * progress


@dataclass(frozen=True)
class Cubic(Linear):
    """Raises the sparsity fast at first, and ever more slowly.

    s_f + (s_i - s_f) * (1 - (t - begin) / (end - begin))^3 at due step t.

    Args:
        begin, end, frequency, final_sparsity, initial_sparsity: as in :class:`Linear`.

    Raises:
        TypeError, ValueError: a value of a wrong type, or out of range.

    Source: Zhu and Gupta, "To prune, or not to prune: exploring the efficacy of pruning for
    model compression", 2017.
    """

    def _between(self, rise: float, progress: float) -> float:
        left = 1.0 - progress
        return self.final_sparsity - rise * (left * left * left)


@dataclass(frozen=True, repr=False)
class Function(Schedule):
    """A function of the step.

    Args:
        fn: called with a due step (an int); returns the sparsity, a share of all elements, in
            [0, 1]. It has to return the same on every rank. Where it decreases, nothing is
            pruned, and pruned elements stay pruned. A saved state identifies it by its name only.
        frequency: steps from one due step to the next.
        begin: first due step.
        end: last due step, even if ``end - begin`` is no multiple of ``frequency``; None: there is
            none.

    Raises:
        TypeError, ValueError: a value of a wrong type, or out of range; from ``sparsity_at``
            also for what ``fn`` returns (NaN, above 1, no number).
    """

    fn: Callable[[int], float]
    frequency: int = 1
    begin: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            kind = type(self.fn).__name__
            raise TypeError(f"fn={self.fn!r} is a {kind}; expected a function of the step.")
        super().__post_init__()

    ends_at = None  # its values are asked for when they are due

    def _due_sparsity(self, step: int) -> float:
        return _checked_sparsity(f"fn({step})", self.fn(step))

    def __repr__(self) -> str:
        # Without the address in a function's own repr: equal on every rank and in every run.
        name = getattr(self.fn, "__qualname__", type(self.fn).__qualname__)
        rest = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:])
        return f"Function(fn={name}, {rest})"


# By the names that recipes have for them.
SCHEDULES: dict[str, type[OneShot | Linear | Cubic]] = {
    "one_shot": OneShot, "linear": Linear, "cubic": Cubic
}  # fmt: skip


def schedule_fields(schedule: Schedule) -> dict[str, Any]:
    """The section ``schedule`` of a recipe.

    Raises:
        ValueError: recipes have no such schedule.
    """
    kinds: dict[type[Schedule], str] = {made: kind for kind, made in SCHEDULES.items()}
    if type(schedule) not in kinds:
        raise ValueError(f"{schedule!r} has no form in a recipe; expected OneShot, Linear, Cubic.")
    return {"kind": kinds[type(schedule)], **vars(schedule)}


def _check_fields(schedule: Schedule) -> None:
    """Check all numbers; makes them Python's, so that reprs are equal."""
    for name, value in vars(schedule).items():
        if name.endswith("sparsity"):
            object.__setattr__(schedule, name, _checked_sparsity(name, value))
        elif name != "fn" and value is not None:
            least = 1 if name == "frequency" else 0
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}; expected an int.")
            if value < least:
                raise ValueError(f"{name}={value} is below {least}; expected an int >= {least}.")
            object.__setattr__(schedule, name, int(value))


def _checked_sparsity(name: str, value: float) -> float:
    check_share(name, value)
    return float(value)
