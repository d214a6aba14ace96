"""How much to prune, as exact counts, and how reports show it.

This module alone knows the rounding rule, so that one process and any sharding of it convert the
same amount to the same count.

[Note: decimals] A bound is read as the decimal that was written: 0.07 of 100 elements are
7. In binary 0.07 * 100 lies above 7, and the floor would be 8. A ``Fraction`` is exact.

[Note: collapse] A parameter has collapsed if at most 1 % of its elements are left, and at least
10 % of those of all parameters that were ranked together: so it keeps at most a tenth of what all
keep. On a pretrained language model, a raw global ranking by Wanda scores pruned one matrix to 99 %
where 30 % were asked for, and the perplexity rose fourfold; with scores divided by their rms no
matrix went above 52 %. If more than 90 % are pruned as a whole, nearly empty layers are expected.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

Amount = int | float
# By (module, name) or full name.
Sparsities = Mapping[Any, float | Fraction]
# One bound for all parameters, or by (module, name) or full name.
SparsityBound = float | Fraction | Sparsities
# The bounds by name, as keywords, recipes and reports have them.
FLOOR, CEILING = "min_sparsity", "max_sparsity"


def check_share(what: str, value: float, expected: str = "a sparsity") -> None:
    """Raise TypeError for what is no real number, ValueError for one outside [0, 1]."""
    # float first: to ask an abstract class takes longer than all else.
    if isinstance(value, bool) or not isinstance(value, (float, numbers.Real)):
        kind = type(value).__name__
        raise TypeError(f"{what}={value!r} is a {kind}; expected a float in [0, 1].")
    if not 0 <= value <= 1:  # or NaN
        raise ValueError(f"{what}={value!r} is not in [0, 1]; expected {expected}.")


def validate_amount(amount: Amount) -> None:
    """Check an amount by itself, before it is applied to a number of elements.

    Args:
        amount: a fraction in [0, 1], or a count >= 0. Anything that is a
            ``numbers.Real`` works: numpy scalars and ``Fraction`` too.

    Raises:
        TypeError: not a real number, or a ``bool``.
        ValueError: a negative count, or a fraction outside [0, 1] (NaN included).
    """
    if isinstance(amount, (bool, float)) or not isinstance(amount, numbers.Integral):
        check_share("amount", amount, "a fraction, or a count")
    elif amount < 0:
        raise ValueError(f"amount={amount!r} is negative; expected a count >= 0.")


def validate_count(amount: Amount, tensor_size: int) -> None:
    """Raise ValueError if an integer ``amount`` is more than there is to prune."""
    if isinstance(amount, numbers.Integral) and amount > tensor_size:
        raise ValueError(f"amount={amount} is more than the {tensor_size} units left to prune.")


def resolve_count(amount: Amount, tensor_size: int) -> int:
    """Convert an amount to a count of elements; halves round to even, as in torch.

    Args:
        amount: a fraction of ``tensor_size`` or a count, already validated.
        tensor_size: how many elements are unpruned.
    """
    is_count = not isinstance(amount, float) and isinstance(amount, numbers.Integral)
    return int(amount) if is_count else round(amount * tensor_size)


def checked_count(amount: Amount, tensor_size: int) -> int:
    """:func:`resolve_count`, and ValueError if that is more than there is."""
    count = resolve_count(amount, tensor_size)
    validate_count(count, tensor_size)
    return count


# How many elements of every whole parameter are to be pruned after a call, at least and at most:
# 0 <= lowest <= highest <= elements.
Bounds = tuple[tuple[int, ...], tuple[int, ...]]


class Bounded(NamedTuple):
    """What the bounds and the sparsity of a parameter depend on: its names, and its size.

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
    sizes = tuple(parameter.num_elements for parameter in parameters)
    lowest = tuple(math.ceil(s * n) for s, n in zip(floors, sizes, strict=True))
    highest = tuple(math.floor(s * n) for s, n in zip(ceilings, sizes, strict=True))
    for parameter, low, high in zip(parameters, lowest, highest, strict=True):
        if low > high:
            raise ValueError(
                f"{parameter.label}: min_sparsity asks for at least {low:,} pruned elements of "
                f"{parameter.num_elements:,}, and max_sparsity for at most {high:,}."
            )
    return (lowest, highest) if any(lowest) or highest != sizes else None


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
    # Not above: it loads torch, and recipes are read without.
    from distprune.base.naming import plain_key

    given: dict[Hashable, list[Any]] = {}
    for key, value in bound.items():
        given.setdefault(plain_key(key), []).append(value)
    known = {key for parameter in parameters for key in parameter.keys}
    for key in given:
        if key not in known:
            shown = (type(key[0]).__name__, *key[1:]) if isinstance(key, tuple) and key else key
            raise ValueError(
                f"{keyword} has {shown!r}, which is none of the parameters; expected (module, "
                f"name) pairs or full names among them, such as {parameters[0].label!r}."
            )
    sparsities = []
    for label, keys, *_ in parameters:
        values = [value for key in keys for value in given.get(key, ())]
        if not values and default is None:
            raise ValueError(
                f"{keyword} does not have {label}; expected a sparsity of every parameter of the "
                "call (0 keeps it dense)."
            )
        exact = {_exact(f"{keyword}[{label}]", value) for value in values or [default or 0]}
        if len(exact) > 1:
            shown = ", ".join(map(repr, values))
            raise ValueError(f"{keyword} has several values for {label}: {shown}; expected one.")
        sparsities.append(exact.pop())
    return sparsities


def _exact(what: str, value: Any) -> Fraction:
    """A sparsity, as the decimal that was written."""
    check_share(what, value)
    is_exact = isinstance(value, numbers.Rational)
    return Fraction(value) if is_exact else Fraction(repr(float(value)))


def collapsed(counts: Sequence[tuple[int, int]]) -> list[int]:
    """The positions of parameters that have collapsed: see [Note: collapse].

    Args:
        counts: of all parameters that were ranked together: elements, and how many are pruned.
    """
    num_elements = sum([elements for elements, _ in counts])
    if 10 * sum([pruned for _, pruned in counts]) > 9 * num_elements:
        return []
    return [i for i, (n, pruned) in enumerate(counts) if 100 * pruned >= 99 * n > 0]


def is_nearly_empty(num_elements: int, num_pruned: int) -> bool:
    """Whether at most 1 % of a parameter's elements are left; not if it has none."""
    return num_elements > 0 and 100 * num_pruned >= 99 * num_elements


def listed(names: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """The first of some names, and how many more there are, for messages."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def share(num_pruned: int, num_elements: int) -> float:
    """The sparsity, in [0, 1]; 0 if there are no elements."""
    return num_pruned / num_elements if num_elements else 0.0


def table(
    heading: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str],
    *,
    left_columns: Sequence[int] = (0,),
) -> list[str]:
    """The lines of a table: heading, rule, rows, rule, total.

    Args:
        heading, rows, total: cells, as many in each.
        left_columns: columns that are aligned on the left; all others are on the right.
    """
    widths = [max(map(len, column)) for column in zip(heading, *rows, total, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column in left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [line(heading), rule, *map(line, rows), rule, line(total)]
