"""How much to prune: from a fraction or a count to an exact number of elements.

The only place that knows the rounding rule, so that one process and any
sharding of it convert the same amount to the same count.
"""

from __future__ import annotations

import math
import numbers

Amount = int | float


def validate_amount(amount: Amount) -> None:
    """Check an amount by itself, before it is applied to a number of elements.

    Args:
        amount: a fraction in [0, 1], or a count >= 0. Anything that is a
            ``numbers.Real`` works: numpy scalars and ``Fraction`` too.

    Raises:
        TypeError: not a real number, or a ``bool``.
        ValueError: a negative count, or a fraction outside [0, 1] (NaN included).
    """
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        raise TypeError(
            f"amount={amount!r} is a {type(amount).__name__}; "
            "expected an int (a count) or a float in [0, 1] (a fraction)."
        )
    if isinstance(amount, numbers.Integral):
        if amount < 0:
            raise ValueError(f"amount={amount!r} is negative; expected a count >= 0.")
    elif math.isnan(amount) or not 0.0 <= float(amount) <= 1.0:
        raise ValueError(
            f"amount={amount!r} is not in [0, 1]; expected a fraction of what is "
            "unpruned as a float in [0, 1], or a count as an int."
        )


def validate_count(amount: Amount, tensor_size: int) -> None:
    """Raise ValueError if an integer ``amount`` is more than there is to prune."""
    if isinstance(amount, numbers.Integral) and amount > tensor_size:
        raise ValueError(
            f"amount={amount} is more than the {tensor_size} units left to prune; "
            f"expected an int <= {tensor_size}, or a fraction in [0, 1]."
        )


def resolve_count(amount: Amount, tensor_size: int) -> int:
    """Convert an amount to a count of elements; halves round to even, as in torch.

    Args:
        amount: a fraction of ``tensor_size`` or a count, already validated.
        tensor_size: how many elements are unpruned.
    """
    if isinstance(amount, numbers.Integral):
        return int(amount)
    return round(amount * tensor_size)


def checked_count(amount: Amount, tensor_size: int) -> int:
    """:func:`resolve_count`, and ValueError if that is more than there is."""
    count = resolve_count(amount, tensor_size)
    validate_count(count, tensor_size)
    return count
