"""Floors and ceilings of single parameters: from the sparsities of a call to exact counts.

[Note: decimals] A bound is read as the decimal that was written: 0.07 of 100 elements are
7. In binary 0.07 * 100 lies above 7, and the floor would be 8. A ``Fraction`` is exact.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

# One bound for all parameters, or by (module, name) or full name.
SparsityBound = float | Fraction | Mapping[Any, float | Fraction]
# The bounds by name, as keywords, recipes and reports have them.
FLOOR, CEILING = "min_sparsity", "max_sparsity"


@dataclass(frozen=True)
class Bounds:
    """How many elements of every whole parameter are to be pruned after a call, at least and most.

    Attributes:
        lowest, highest: per parameter; 0 <= lowest <= highest <= elements.
    """

    lowest: tuple[int, ...]
    highest: tuple[int, ...]


@dataclass(frozen=True)
class Bounded:
    """What the bounds and the budget of a parameter depend on: its names, and its size.

    Attributes:
        label: its name in messages.
        keys: under which a mapping may have it.
        num_elements: of the whole parameter ...
        shape: ... and its shape, for budgets.
    """

    label: str
    keys: tuple[Hashable, ...]
    num_elements: int
    shape: tuple[int, ...] = ()


def to_bounds(
    parameters: Sequence[Bounded],
    min_sparsity: SparsityBound | None,
    max_sparsity: SparsityBound | None,
) -> Bounds | None:
    """Convert to counts: floors are rounded up and ceilings down; see [Note: decimals].

    Args:
        parameters: of the call.
        min_sparsity, max_sparsity: for all parameters, or a mapping; None, 0 below and 1
            above, and parameters that are not in a mapping, are unbounded.

    Returns:
        Counts; None if nothing is bounded.

    Raises:
        TypeError: a bound that is no number.
        ValueError: a bound outside [0, 1]; a floor above a ceiling; a key that is no parameter.
    """
    floors = per_parameter(FLOOR, min_sparsity, parameters, default=0)
    ceilings = per_parameter(CEILING, max_sparsity, parameters, default=1)
    sizes = [parameter.num_elements for parameter in parameters]
    lowest = tuple(math.ceil(s * n) for s, n in zip(floors, sizes, strict=True))
    highest = tuple(math.floor(s * n) for s, n in zip(ceilings, sizes, strict=True))
    for parameter, low, high in zip(parameters, lowest, highest, strict=True):
        if low > high:
            raise ValueError(
                f"{parameter.label}: min_sparsity asks for at least {low:,} pruned elements of "
                f"{parameter.num_elements:,} and max_sparsity for at most {high:,}; expected a "
                "floor that is not above the ceiling. Widen the bounds, or exempt so small a "
                "parameter."
            )
    if not any(lowest) and list(highest) == sizes:
        return None
    return Bounds(lowest, highest)


def violated_bound(num_to_prune: int, num_lowest: int, num_highest: int) -> str | None:
    """The bound that forbids to prune exactly so many elements of all parameters together.

    Args:
        num_to_prune: elements.
        num_lowest, num_highest: the sums of all floors, and of all ceilings.

    Returns:
        FLOOR if the floors need more, CEILING if the ceilings allow fewer, None if neither.
    """
    if num_lowest > num_to_prune:
        return FLOOR
    return CEILING if num_highest < num_to_prune else None


def per_parameter(
    keyword: str, bound: SparsityBound | None, parameters: Sequence[Bounded], default: int | None
) -> list[Fraction]:
    """One sparsity per parameter, from a bound of all or from a mapping.

    Args:
        keyword: for messages.
        bound: of all parameters, or a mapping from their keys; None: the default.
        parameters: of the call.
        default: of parameters that are not in a mapping; None: all of them have to be in it.

    Raises:
        TypeError: a bound that is no number.
        ValueError: a bound outside [0, 1]; a key that is no parameter; a parameter that is missing,
            or has several values.
    """
    if not isinstance(bound, Mapping):
        return [_exact(keyword, default if bound is None else bound)] * len(parameters)
    used: set[Hashable] = set()
    sparsities = []
    for parameter in parameters:
        keys = [key for key in parameter.keys if key in bound]
        if not keys and default is None:
            raise ValueError(
                f"{keyword} does not have {parameter.label}; expected a sparsity of every "
                "parameter of the call. Give it one (0 keeps it dense), or leave the parameter out."
            )
        used.update(keys)
        values = {_exact(f"{keyword}[{parameter.label}]", bound[key]) for key in keys} or {
            Fraction(default or 0)
        }
        if len(values) > 1:
            raise ValueError(
                f"{keyword} has several values for {parameter.label}: "
                f"{', '.join(repr(bound[key]) for key in keys)}; expected one."
            )
        sparsities.append(values.pop())
    unknown = [key for key in bound if key not in used]
    if unknown:
        raise ValueError(
            f"{keyword} has {_shown(unknown[0])}, which is none of the parameters; expected "
            f"(module, name) pairs or full names among them, such as {parameters[0].label!r}."
        )
    return sparsities


def _exact(what: str, value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{what}={value!r} is a {type(value).__name__}; expected a float in [0, 1]."
        )
    if isinstance(value, numbers.Rational):
        exact = Fraction(value)
    else:
        exact = Fraction(repr(float(value))) if math.isfinite(value) else Fraction(-1)
    if not 0 <= exact <= 1:
        raise ValueError(f"{what}={value!r} is not in [0, 1]; expected a sparsity.")
    return exact


def _shown(key: Any) -> str:
    if isinstance(key, tuple) and len(key) == 2:
        return f"({type(key[0]).__name__}, {key[1]!r})"
    return repr(key)
