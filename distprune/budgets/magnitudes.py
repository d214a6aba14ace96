"""Counts and exact sums of squares of this rank's magnitudes, chunk by chunk.

[Note: digits] A square is cut into three digits of 31 bits, relative to the largest square of the
whole parameter, and each digit is added as an integer. So a sum does not depend on the order of its
terms, nor on how elements are spread over ranks; what is cut off is below 2**-93 of the largest
square, per element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distprune._common import memory
from distprune._common.mask_values import is_one
from distprune._common.memory import Array, Scratch
from distprune.selection.candidates import Candidates
from distprune.selection.chunks import call_all, chunks_of, num_threads_for
from distprune.selection.keys import KeyRange

NUM_DIGITS = 3
_DIGIT_BITS = 31


@dataclass(frozen=True)
class Window:
    """The keys of one parameter that a pass counts; its bins are as those of ``_common/radix.py``.

         0           low                              high              top
         |   rest     |----|----|----|----|----|----|---|   sum of squares |

    Attributes:
        low, high: a closed interval of keys, in bins of 2**shift keys ...
        shift: ... the edges of which are multiples of 2**shift.
        top: the squares of the keys above ``high`` are added up, as far as this one.
        has_rest: whether the keys below ``low`` are counted, too.
        exponent: the magnitudes of the parameter are below 2**exponent.
    """

    low: int
    high: int
    shift: int
    top: int
    has_rest: bool
    exponent: int

    @property
    def num_bins(self) -> int:
        """Bins, without the rest."""
        return (self.high >> self.shift) - (self.low >> self.shift) + 1

    @property
    def size(self) -> int:
        """Integers that a pass makes: the rest, the bins, and the digits of the sum."""
        return self.has_rest + self.num_bins + NUM_DIGITS

    def edges(self) -> tuple[Array, Array]:
        """The lowest and the highest key of the rest, if it is counted, and of every bin."""
        first = self.low >> self.shift
        starts = (np.arange(self.num_bins, dtype=np.int64) + first) << self.shift
        low = np.maximum(starts, self.low)
        high = np.minimum(starts + ((1 << self.shift) - 1), self.high)
        if self.has_rest:
            low, high = np.append(0, low), np.append(self.low - 1, high)
        return low, high


@dataclass
class Counter:
    """This rank's magnitudes, which get fewer from pass to pass.

    Attributes:
        parts: this rank's part of every parameter.
        keys: the range of all keys.
    """

    parts: Sequence[Candidates]
    keys: KeyRange
    # By parameter, the keys in the window of the pass that stored them.
    _stored: dict[int, Array] = field(default_factory=dict)

    def largest(self) -> Tensor:
        """The largest live key of each parameter, int64; -1 of none. A local step."""
        chunks = chunks_of(self.parts, only_counted=True)
        calls = [partial(_largest_of, self.parts[position], span) for position, span in chunks]
        found = call_all(calls, num_threads_for(self.parts, chunks))
        largest = [-1] * len(self.parts)
        for (position, _), key in zip(chunks, found, strict=True):
            largest[position] = max(largest[position], key)
        return torch.tensor(largest, dtype=torch.int64)

    def forget(self, position: int) -> None:
        """Free what is stored of a parameter."""
        self._stored.pop(position, None)

    def count(self, windows: Mapping[int, Window], *, store: bool) -> Tensor:
        """What :attr:`Window.size` lists, of one parameter after the other. A local step.

        Args:
            windows: by position of the parameter. Inside the window of the pass before.
            store: store the keys in the windows, and in their rests, so that the next passes visit
                no others.
        """
        rows = {i: np.zeros(window.size, dtype=np.int64) for i, window in windows.items()}
        fresh = [i for i in windows if i not in self._stored]
        parts = [self.parts[i] for i in fresh]
        chunks = chunks_of(parts, only_counted=True)
        calls = [
            partial(_count_chunk, parts[n], span, windows[fresh[n]], self.keys, store)
            for n, span in chunks
        ]
        kept: dict[int, list[Array]] = {i: [] for i in fresh}
        for (n, _), (row, inside) in zip(
            chunks, call_all(calls, num_threads_for(parts, chunks)), strict=True
        ):
            rows[fresh[n]] += row
            if inside is not None:
                kept[fresh[n]].append(inside)
        for i, window in windows.items():
            if i in self._stored:
                rows[i], self._stored[i] = _count_keys(self._stored[i], window, self.keys)
            elif store:
                empty = np.zeros(0, dtype=np.int64)
                self._stored[i] = np.concatenate(kept[i]) if kept[i] else empty
        return torch.from_numpy(np.concatenate(list(rows.values())))


def sum_from_digits(digits: Sequence[int]) -> int:
    """A sum of squares in units of 2**-93 of the square of 2**exponent."""
    total = 0
    for digit in digits:
        total = (total << _DIGIT_BITS) + int(digit)
    return total


def as_float(total: int) -> float:
    """A sum of squares, relative to the square of 2**exponent; rounded once."""
    return total / (1 << NUM_DIGITS * _DIGIT_BITS)


def squares_of(keys: Array, common: KeyRange, exponent: int) -> Array:
    """float64: (magnitude / 2**exponent)**2 of keys, rounded once."""
    values = _magnitudes_on_cpu(keys, common)
    for scale in _scales(-exponent):
        values *= scale
    squares: Array = np.square(values, out=values)
    return squares


def magnitude_of(key: int, common: KeyRange) -> float:
    """The magnitude that a key stands for."""
    return float(_magnitudes_on_cpu(np.array([key]), common)[0])


def _magnitudes(keys: Tensor, common: KeyRange) -> Tensor:
    """float64; keys of float scores are the bits of their magnitudes."""
    if common.is_float:
        keys = keys.to(common.dtype).view(common.value_dtype)
    return keys.double()


def _magnitudes_on_cpu(keys: Array, common: KeyRange) -> Array:
    """The same by numpy, without torch's threads: a new array."""
    if not common.is_float:
        return keys.astype(np.float64)
    if common.value_dtype is torch.bfloat16:  # numpy has none: it is the upper half of a float32
        return (keys.astype(np.int32) << 16).view(np.float32).astype(np.float64)
    bits = keys.astype(f"i{common.dtype.itemsize}", copy=False)
    return bits.view(f"f{common.dtype.itemsize}").astype(np.float64)


def _largest_of(part: Candidates, span: range, scratch: Scratch) -> int:
    keys = _live_keys(part, span, scratch)
    return int(keys.max()) if keys.numel() else -1


def _live_keys(part: Candidates, span: range, scratch: Scratch) -> Tensor:
    """Keys of the live elements of a chunk; valid until the scratch is used again."""
    keys = part.keys.load(span.start, span.stop, scratch).values
    if part.live is None:
        return keys
    live = part.live[span.start : span.stop]
    if not memory.takes_numpy(keys.device):
        return keys[live == 1]
    return torch.from_numpy(keys.numpy()[is_one(live)])


def _count_chunk(
    part: Candidates, span: range, window: Window, common: KeyRange, store: bool, scratch: Scratch
) -> tuple[Array, Array | None]:
    keys = _live_keys(part, span, scratch)
    if memory.takes_numpy(keys.device):
        row, inside = _count_keys(keys.numpy(), window, common)
        if store and window.has_rest:
            inside = keys.numpy().copy()
        return row, inside if store else None
    is_inside = (keys >= window.low) & (keys <= window.high)
    kept = keys[is_inside]
    bins = (kept >> window.shift).long() - (window.low >> window.shift)
    counts = [torch.bincount(bins, minlength=window.num_bins)]
    if window.has_rest:
        counts.insert(0, torch.count_nonzero(keys < window.low).view(1))
    above = keys[(keys > window.high) & (keys <= window.top)]
    values = _magnitudes(above, common)
    for scale in _scales(-window.exponent):
        values = values * scale
    rest = values.square_()
    for _ in range(NUM_DIGITS):
        rest = rest * (1 << _DIGIT_BITS)
        digit = rest.floor()
        counts.append(digit.long().sum().view(1))
        rest = rest - digit
    stored = (keys if window.has_rest else kept).cpu().numpy() if store else None
    return torch.cat(counts).cpu().numpy(), stored


def _count_keys(keys: Array, window: Window, common: KeyRange) -> tuple[Array, Array]:
    """A row of a pass, and the keys inside the window; at most some millions of keys at a time."""
    inside = keys[(keys >= window.low) & (keys <= window.high)]
    row = np.zeros(window.size, dtype=np.int64)
    bins = (inside >> window.shift).astype(np.int64)
    bins -= window.low >> window.shift
    row[window.has_rest : -NUM_DIGITS] = np.bincount(bins, minlength=window.num_bins)
    if window.has_rest:
        row[0] = np.count_nonzero(keys < window.low)
    above = keys[(keys > window.high) & (keys <= window.top)]
    # Digits of so many squares have a sum below 2**53: it is exact in float64.
    for start in range(0, above.size, 1 << 20):
        rest = squares_of(above[start : start + (1 << 20)], common, window.exponent)
        for number in range(NUM_DIGITS):
            rest *= 1 << _DIGIT_BITS
            digit = np.floor(rest)
            row[number - NUM_DIGITS] += int(digit.sum())
            rest -= digit
    return row, inside


def _scales(shift: int) -> tuple[float, float]:
    """Two powers of two whose product is 2**shift, neither of which overflows."""
    return math.ldexp(1.0, shift // 2), math.ldexp(1.0, shift - shift // 2)
