"""Boxes of an array: what a run of its row-major order is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def boxes_of_run(sizes: Sequence[int], first: int, last: int) -> Iterator[tuple[range, ...]]:
    """The boxes that hold the elements [first, last) of an array, in row-major order.

    At most 2 * len(sizes) - 1 of them: whole rows together, and parts of the rows at both ends.
    """
    if len(sizes) < 2:
        if first < last:
            yield (range(first, last),) if sizes else ()
        return
    row_size = math.prod(sizes[1:])
    while first < last:
        row, column = divmod(first, row_size)
        if column or last - first < row_size:
            stop = min(last - row * row_size, row_size)
            for ranges in boxes_of_run(sizes[1:], column, stop):
                yield (range(row, row + 1), *ranges)
            first = row * row_size + stop
        else:
            yield (range(row, last // row_size), *(range(size) for size in sizes[1:]))
            first = last // row_size * row_size
