"""Normalisation: the scores of each parameter are divided by their rms, l2 norm or mean.

It makes parameters of different scales comparable in one ranking. Inside a parameter the order
stays, but for scores that become equal by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from distprune.base import exact_sums, memory
from distprune.base.exact_sums import Normalization
from distprune.base.mask_values import is_one
from distprune.base.memory import Array, Count, Scratch, on_host
from distprune.base.naming import UnfitScores
from distprune.ranks.collectives import Communicator
from distprune.selection.kernels import call_all, kernels_on, num_threads, spans_of
from distprune.selection.scores import ScaledScores, ScoreSource, widened
from distprune.shards.shard import Shard


@dataclass(frozen=True)
class Scored:
    """One rank's part of one parameter, as a normalisation sees it.

    Attributes:
        name: for messages.
        scores: of the flat local elements.
        live: flat mask in force; elements that are 1 count. None: all do.
        counted: the flat positions that this rank counts.
        device: of the scores.
        keeps_nan: whether NaN are left out of statistics, because they are kept.
    """

    name: str
    scores: ScoreSource
    live: Tensor | None
    counted: range
    device: torch.device
    keeps_nan: bool = False

    @classmethod
    def of_shard(cls, shard: Shard, scores: ScoreSource) -> Scored:
        """Scores of a shard, of which the live elements count."""
        return cls(shard.name, scores, shard.flat_mask, shard.counted, shard.values.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the normalised scores."""
        return torch.promote_types(self.scores.dtype, torch.float32)


def normalized(
    parts: Sequence[Scored],
    normalize: Normalization,
    num_live: Sequence[int],
    communicator: Communicator,
) -> list[ScoreSource]:
    """The scores of all parameters, each divided by its statistic. Collective.

    Args, raises and cost: as :func:`divisors_of`.
    """
    divisors = divisors_of(parts, normalize, num_live, communicator)
    return [
        ScaledScores(part.scores, exact_sums.scale_of(divisor, part.dtype))
        for part, divisor in zip(parts, divisors, strict=True)
    ]


def divisors_of(
    parts: Sequence[Scored],
    normalize: Normalization,
    num_live: Sequence[int],
    communicator: Communicator,
) -> list[float]:
    """The statistic that the scores of each parameter are divided by. Collective.

    Args:
        parts: this rank's part of every parameter; the same list on all ranks.
        normalize: "rms", "l2" or "mean", over the live elements of the whole parameter.
        num_live: live elements of every whole parameter.
        communicator: the ranks that have the parts.

    Raises:
        ValueError: a live score is infinite; names its parameter.
        ValueError: a statistic is too small or too large for float64; names its parameter.
        NotImplementedError: scores that are no floating-point numbers. On every rank.

    Cost: two reads of the scores; all-reduces of 8 and of 16 bytes
    per parameter. See exact_sums.[Note: grid].
    """
    what = f"normalize={normalize!r}"
    power = exact_sums.power_of(normalize)
    largest = largest_scores(parts, what, communicator, ", or normalize=None")
    # NaN is not above 0 either: the ranking itself refuses it, by the name of the parameter.
    exponents = [exact_sums.exponent_of(value) if value > 0 else None for value in largest]
    totals = grid_sums(parts, exponents, power, communicator)
    divisors = []
    for part, total, exponent, number in zip(parts, totals, exponents, num_live, strict=True):
        divisors.append(exact_sums.statistic(normalize, total, exponent or 0, number))
        exact_sums.check_divisor(divisors[-1], normalize, part.name)
    return divisors


def largest_scores(
    parts: Sequence[Scored], what: str, communicator: Communicator, way_out: str = ""
) -> list[float]:
    """The largest live |score| of each parameter over all ranks; NaN if there is one. Collective.

    Args:
        parts: this rank's part of every parameter; the same list on all ranks.
        what: the argument that needs it, for messages.
        communicator: the ranks that have the parts.
        way_out: how to do without finite scores, for messages.

    Raises:
        ValueError: a live score is infinite; names its parameter.
        NotImplementedError: scores that are no floating-point numbers. On every rank.

    Cost: a read of the scores; an all-reduce of 8 bytes per parameter.
    """

    def find_largest() -> Tensor:
        for part in parts:
            if not part.scores.dtype.is_floating_point:
                raise NotImplementedError(
                    f"{part.name}: {what} of scores of dtype {part.scores.dtype}; expected "
                    "floating point."
                )
        found = per_chunk(parts, [_largest_bits] * len(parts))
        values = [max(chunks, default=0) for chunks in found]
        return torch.tensor(values, dtype=torch.int64)

    # The bits of non-negative float64 numbers are in their order; those of NaN are above inf's.
    bits = communicator.reduce(len(parts), find_largest, "max")
    largest: list[float] = bits.view(torch.float64).tolist()
    infinite = [p.name for p, value in zip(parts, largest, strict=True) if math.isinf(value)]
    if infinite:
        have = "has" if len(infinite) == 1 else "have"
        raise UnfitScores(
            f"{', '.join(infinite)} {have} infinite scores, so {what} has no meaning; "
            f"expected finite scores{way_out}.",
            "infinite",
            infinite,
        )
    return largest


def grid_sums(
    parts: Sequence[Scored],
    exponents: Sequence[int | None],
    power: Literal[1, 2],
    communicator: Communicator,
) -> list[int]:
    """Exact sums of |score|**power of each parameter over all ranks. Collective.

    Args:
        parts: this rank's part of every parameter; the same list on all ranks.
        exponents: of the grid of each; None: the sum is 0. See exact_sums.[Note: grid].
        power: 1 or 2.
        communicator: the ranks that have the parts.

    Cost: a read of the scores; an all-reduce of 16 bytes per parameter.
    """

    def add_up() -> Tensor:
        measures: list[Measure] = [
            (lambda part, span, scratch: 0)
            if exponent is None
            else partial(_grid_sum, exponent, power)
            for exponent in exponents
        ]
        totals = [sum(chunks) for chunks in per_chunk(parts, measures)]
        return torch.tensor([exact_sums.to_words(total) for total in totals]).view(-1)

    words = communicator.reduce(2 * len(parts), add_up).view(-1, 2).tolist()
    return [exact_sums.from_words(high, low) for high, low in words]


# From a chunk of a part to a number.
Measure = Callable[[Scored, range, Scratch], Count]


def per_chunk(parts: Sequence[Scored], measures: Sequence[Measure]) -> list[list[int]]:
    """Per part, a number of each chunk of the elements that this rank counts."""
    chunks = [
        (position, span)
        for position, part in enumerate(parts)
        for span in spans_of(part.counted, part.device, part.dtype.itemsize)
    ]
    calls = [partial(measures[position], parts[position], span) for position, span in chunks]
    threads = 1
    if all(p.scores.is_thread_safe and kernels_on(p.device).USES_THREADS for p in parts):
        num_bytes = sum(len(span) * parts[position].dtype.itemsize for position, span in chunks)
        threads = num_threads(num_bytes, len(calls))
    numbers: list[list[int]] = [[] for _ in parts]
    for (position, _), number in zip(chunks, on_host(call_all(calls, threads)), strict=True):
        numbers[position].append(number)
    return numbers


def _numbers(part: Scored, values: Array) -> Array:
    """The values, or zero in place of NaN that are kept."""
    return np.where(np.isnan(values), values.dtype.type(0), values) if part.keeps_nan else values


def _largest_bits(part: Scored, span: range, scratch: Scratch) -> Count:
    """The bits of the largest live |score| as float64."""
    scores = part.scores.load(span.start, span.stop, scratch)
    if not memory.takes_numpy(part.device):
        live = live_flags(part, span)
        magnitudes = scores.abs().double()
        if live is not None:
            magnitudes = magnitudes.where(live, 0.0)
        # amax keeps NaN, whose sign is cleared by abs().
        return magnitudes.amax().view(torch.int64)
    wide = widened(scores, scratch, part.dtype)
    if part.live is not None:
        wide = wide[live_array(part.live, span, scratch)]
    value = exact_sums.largest_of(_numbers(part, wide))
    return int(np.float64(abs(value)).view(np.int64))


def _grid_sum(
    exponent: int, power: Literal[1, 2], part: Scored, span: range, scratch: Scratch
) -> Count:
    scores = part.scores.load(span.start, span.stop, scratch)
    if not memory.takes_numpy(part.device):
        return exact_sums.grid_sum_on_device(scores, exponent, power, live_flags(part, span))
    live = None if part.live is None else live_array(part.live, span, scratch)
    wide = widened(scores, scratch, part.dtype)
    return exact_sums.grid_sum(_numbers(part, wide), exponent, power, scratch, live)


def live_flags(part: Scored, span: range) -> Tensor | None:
    return None if part.live is None else part.live[span.start : span.stop] == 1


def live_array(live: Tensor, span: range, scratch: Scratch) -> Array:
    chunk = live[span.start : span.stop]
    return is_one(chunk, out=scratch.array("live", chunk.numel(), bool))
