"""Exact sums of scores, the same on every sharding: normalisation, and sums of rows and columns.

A normalisation divides the scores of each parameter by their rms, l2 norm or mean, which makes
parameters of different scales comparable in one ranking. Inside a parameter the order stays, but
for scores that become equal by rounding. Each sum has a grid of its own, 2**-36 of the largest term
in it: see exact_sums.[Note: grid].
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from distprune.base import exact_sums, memory
from distprune.base.blocks import WeightLayout
from distprune.base.exact_sums import GRID_BITS, Normalization
from distprune.base.memory import SERIAL, Array, Count, Scratch, is_one, on_host
from distprune.base.naming import UnfitScores
from distprune.ranking.chunks import Elements, call_all, operations_on, spans_of
from distprune.ranking.scores import ScoreSource, slice_of, widened
from distprune.ranks.collectives import Communicator
from distprune.shards.geometry import IndexMap, MatrixRun


@dataclass(frozen=True)
class Scored:
    """One rank's part of one parameter, and its scores.

    Attributes:
        shard: whose live elements count.
        scores: of its flat local elements.
        counts: int64, how often each score occurs; None: once.
    """

    shard: Elements
    scores: ScoreSource
    counts: Array | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the normalised scores."""
        return torch.promote_types(self.scores.dtype, torch.float32)

    def magnitudes(self, span: range, scratch: Scratch) -> Array | Tensor:
        """|score| of the live elements of a span, 0 for the others.

        Of the dtype of the normalised scores, an array on a CPU; float64 on a device.
        """
        scores = self.scores.load(span.start, span.stop, scratch)
        live = self.shard.flat_mask
        live = None if live is None else live[span.start : span.stop]
        if not memory.takes_numpy(self.scores.device):
            found = scores.double().abs()
            return found if live is None else found.where(live == 1, 0.0)
        wide = widened(scores, scratch, self.dtype)
        out = scratch.array("magnitudes", wide.size, wide.dtype)
        np.abs(wide, out=out)
        if live is not None:
            out[~is_one(live, out=scratch.array("live", live.numel(), bool))] = 0
        return out


def per_part(
    parts: Sequence[Scored],
    measure: Callable[[int, range, Scratch], Count],
    combine: Callable[[Sequence[int]], int] = sum,
    most: int = 1 << 62,
) -> list[int]:
    """A number of each part: those of the chunks that this rank counts, combined.

    Args:
        measure: from the number of a part and a span of it.
        most: elements of a span on a CPU.
    """
    items, are_safe = [], True
    for i, part in enumerate(parts):
        size = operations_on(part.scores.device).CHUNK_BYTES // part.dtype.itemsize
        is_on_host = memory.takes_numpy(part.scores.device)
        are_safe &= is_on_host and part.scores.is_thread_safe
        spans = spans_of(part.shard.counted, min(size, most) if is_on_host else size)
        items += [(i, span) for span in spans]
    numbers: list[list[int]] = [[] for _ in parts]
    found = on_host(call_all(measure, items, are_safe))
    for (i, _), number in zip(items, found, strict=True):
        numbers[i].append(int(number))
    return [combine(own or [0]) for own in numbers]


def divisors_of(
    parts: Sequence[Scored], normalize: Normalization, num_live: Sequence[int], ranks: Communicator
) -> list[float]:
    """What the scores of each parameter are divided by, for ``ScaledScores``. Collective.

    Args:
        parts: this rank's part of every parameter; the same list on all ranks.
        normalize: "rms", "l2" or "mean", over the live elements of the whole parameter.
        num_live: live elements of every whole parameter.
        ranks: the ranks that have the parts.

    Raises:
        ValueError: as :func:`largest_scores`.
        NotImplementedError: scores that are no floating-point numbers. On every rank.

    Cost: two reads of the scores; all-reduces of 8 and of 16 bytes per parameter.
    """
    largest = largest_scores(parts, f"normalize={normalize!r}", ranks, ", or normalize=None")
    # NaN is not above 0 either: the ranking itself refuses it, by the name of the parameter.
    exponents = [exact_sums.exponent_of(value) if value > 0 else None for value in largest]
    totals = grid_sums(parts, exponents, exact_sums.power_of(normalize), ranks)
    return [
        exact_sums.statistic(normalize, total, exponent or 0, number)
        for total, exponent, number in zip(totals, exponents, num_live, strict=True)
    ]


def largest_scores(
    parts: Sequence[Scored], what: str, ranks: Communicator, way_out: str = ""
) -> list[float]:
    """The largest live |score| of each parameter over all ranks; NaN if there is one. Collective.

    Args:
        parts: this rank's part of every parameter; the same list on all ranks.
        what: the argument that needs it, for messages.
        ranks: the ranks that have the parts.
        way_out: how to do without finite scores, for messages.

    Raises:
        ValueError: the largest is infinite, above 2**900, or below 2**-900 and not 0, where float64
            may not hold a statistic or its inverse; names its parameter.
        NotImplementedError: scores that are no floating-point numbers. On every rank.

    Cost: a read of the scores; an all-reduce of 8 bytes per parameter.
    """

    def largest_bits(i: int, span: range, scratch: Scratch) -> Count:
        found = parts[i].magnitudes(span, scratch).max()
        if isinstance(found, Tensor):
            return found.view(torch.int64)
        return int(np.float64(found).view(np.int64))

    # The bits of non-negative float64 numbers are in their order; those of NaN are above inf's.
    with ranks.local_step(len(parts), "max") as bits:
        for part in parts:
            if not part.scores.dtype.is_floating_point:
                raise NotImplementedError(
                    f"{part.shard.name}: {what} of scores of dtype {part.scores.dtype}; expected "
                    "floating point."
                )
        bits.copy_(torch.tensor(per_part(parts, largest_bits, max)))
    largest: list[float] = bits.view(torch.float64).tolist()
    most = exact_sums.LARGEST_SCORE
    unfit = [i for i, value in enumerate(largest) if value > most or 0 < value < 1 / most]
    if unfit:
        names = [parts[i].shard.name for i in unfit]
        kind = "infinite" if math.inf in largest else "too large or too small"
        raise UnfitScores(
            f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} {kind} scores, so {what} "
            f"has no meaning; expected finite scores, the largest from 2**-900 to 2**900{way_out}.",
            "infinite",
            names,
        )
    return largest


def grid_sums(
    parts: Sequence[Scored],
    exponents: Sequence[int | None],
    power: Literal[1, 2],
    ranks: Communicator,
) -> list[int]:
    """Exact sums of |score|**power of each parameter over all ranks. Collective.

    Args:
        parts: this rank's part of every parameter; the same list on all ranks.
        exponents: of the grid of each; None: the sum is 0. See exact_sums.[Note: grid].
        power: 1 or 2.
        ranks: the ranks that have the parts.

    Cost: a read of the scores; an all-reduce of 16 bytes per parameter.
    """

    def grid_sum(i: int, span: range, scratch: Scratch) -> Count:
        exponent = exponents[i]
        if exponent is None:
            return 0
        magnitudes = parts[i].magnitudes(span, scratch)
        if isinstance(magnitudes, Tensor):
            return exact_sums.grid_sum_on_device(magnitudes, exponent, power)
        counts = parts[i].counts
        if counts is not None:
            counts = counts[span.start : span.stop]
        return exact_sums.grid_sum(magnitudes, exponent, power, scratch, counts)

    with ranks.local_step(2 * len(parts)) as words:
        pairs = [divmod(total, exact_sums.WORD) for total in per_part(parts, grid_sum)]
        words.copy_(torch.tensor(pairs).view(-1))
    return [high * exact_sums.WORD + low for high, low in words.view(-1, 2).tolist()]


def matrices_of(
    index: IndexMap, layout: WeightLayout, *, is_here: bool = True
) -> tuple[MatrixRun, list[Tensor]]:
    """How a part lies in matrices, and the numbers of the input and of the output there."""
    numbers = [
        layout.of_inputs(torch.arange(layout.num_inputs).view(layout.input_shape)),
        layout.of_outputs(torch.arange(layout.num_outputs)),
    ]
    matrix = MatrixRun(index, numbers if is_here else ())
    return matrix, [matrix.matrix_of(each, layout.shape) for each in numbers if is_here]


def magnitude_sums(
    weights: Sequence[tuple[Scored, IndexMap, WeightLayout]], ranks: Communicator
) -> list[list[Tensor]]:
    """Sum |w| of the live elements, of each input and of each output. Collective.

    Args:
        weights: this rank's part of every weight, where its elements are in the whole, and the
            layout of that; the same list on all ranks.
        ranks: the ranks that have the parts.

    Returns:
        Per weight, fp64 [inputs] and [outputs]; bit-equal on all ranks and on every sharding.

    Raises:
        ValueError: an element is NaN or infinite; names its weight. On every rank.

    Cost: two reads of the weights; two all-reduces of 8 bytes per sum.
    """
    sizes = [size for *_, layout in weights for size in (layout.num_inputs, layout.num_outputs)]

    def per_weight(values: Tensor) -> list[list[Tensor]]:
        sums = torch.split(values, sizes)
        return [[*both] for both in zip(sums[::2], sums[1::2], strict=True)]

    bits = ranks.reduce(sum(sizes), lambda: _reduced(weights, sizes, None), "max")
    largest = bits.view(torch.float64)
    for what, is_wrong in (("nan", torch.isnan), ("infinite", torch.isinf)):
        of_weights = zip(weights, per_weight(is_wrong(largest)), strict=True)
        names = [part.shard.name for (part, *_), own in of_weights if torch.cat(own).any()]
        if names:
            text = "the sum of its magnitudes is not finite; expected finite weights."
            raise UnfitScores(f"{', '.join(names)}: {text}", what, names)
    exponents = torch.frexp(largest).exponent
    sums = ranks.reduce(sum(sizes), lambda: _reduced(weights, sizes, exponents)).double()
    for scale in _powers(exponents - GRID_BITS):
        sums *= scale
    return per_weight(sums)


def _reduced(
    weights: Sequence[tuple[Scored, IndexMap, WeightLayout]],
    sizes: Sequence[int],
    exponents: Tensor | None,
) -> Tensor:
    """This rank's largest bits of |w|, or with exponents the sums in units of the grid: int64."""
    parts = [part for part, *_ in weights]
    matrices = [
        matrices_of(index, layout, is_here=part.scores.size > 0) for part, index, layout in weights
    ]
    devices = {part.scores.device for part in parts}
    outs = {each: torch.zeros(sum(sizes), dtype=torch.int64, device=each) for each in devices}
    firsts = list(itertools.accumulate(sizes, initial=0))
    lock = threading.Lock()

    def visit(i: int, span: range, scratch: Scratch) -> Count:
        magnitudes = torch.as_tensor(parts[i].magnitudes(span, scratch)).double()
        out, (matrix, both) = outs[parts[i].scores.device], matrices[i]
        several = [places.to(out.device) for places in both]
        for block in matrix.blocks(span.start, span.stop):
            start, stop, _, rows, columns = block
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            values = magnitudes[start:stop].view(shape)
            for first, places in zip(firsts[2 * i :], several, strict=False):
                place = slice_of(places, block) + first
                axes = [axis for axis in (0, 1) if place.shape[axis] == 1]
                if exponents is None:
                    found = (values.amax(axes, keepdim=True) if axes else values).view(torch.int64)
                else:
                    up, down = _powers(GRID_BITS - exponents.to(out.device)[place])
                    found = (values * up).mul_(down).round_().long()
                    found = found.sum(axes, keepdim=True) if axes else found
                at, found = place.reshape(-1), found.reshape(-1)
                with lock:
                    if exponents is None:
                        out.scatter_reduce_(0, at, found, "amax")
                    else:
                        out.index_add_(0, at, found)
        return 0

    per_part(parts, visit, most=SERIAL)
    found = torch.stack([out.cpu() for out in outs.values()])
    return found.amax(0) if exponents is None else found.sum(0)


def _powers(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Two powers of two whose product is 2**exponent, which by itself might overflow: float64."""
    half = exponents.long() // 2
    first, second = (((each + 1023) << 52) for each in (half, exponents.long() - half))
    return first.view(torch.float64), second.view(torch.float64)
