"""Sums of |w| along the rows and the columns of matrices, the same on every sharding.

Each sum has a grid of its own, 2**-36 of the largest |w| in it: see exact_sums.[Note: grid].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distprune.base import exact_sums, memory
from distprune.base.blocks import WeightLayout
from distprune.base.memory import Array, Scratch
from distprune.base.naming import UnfitScores
from distprune.ranks.collectives import Communicator
from distprune.selection.kernels import call_all, kernels_on, num_threads, spans_of
from distprune.selection.normalizing import Scored, live_array, live_flags
from distprune.selection.scores import slice_of, widened
from distprune.shards.geometry import IndexMap, MatrixRun


@dataclass(frozen=True)
class Summed:
    """One rank's part of a weight, and the sums that its elements belong to.

    Attributes:
        part: whose scores are the elements w.
        matrix: how they lie in matrices.
        places: of each kind of sum, int64 [matrices or 1, rows or 1, columns or 1]: the number of
            the sum that an element belongs to; empty if nothing is counted here.
        sizes: how many sums of each kind there are.
    """

    part: Scored
    matrix: MatrixRun
    places: Sequence[Tensor]
    sizes: Sequence[int]

    @classmethod
    def of(
        cls, part: Scored, index: IndexMap, layout: WeightLayout, *, is_here: bool = True
    ) -> Summed:
        """The sums over the outputs, of each input, and over the inputs, of each output.

        Args:
            index: of the part.
            layout: of the whole weight.
            is_here: False if no element of it is.
        """
        matrix, places = matrices_of(index, layout, is_here=is_here)
        return cls(part, matrix, places, (layout.num_inputs, layout.num_outputs))


def matrices_of(
    index: IndexMap, layout: WeightLayout, *, is_here: bool = True
) -> tuple[MatrixRun, list[Tensor]]:
    """How a part lies in matrices, and the numbers of the input and of the output there."""
    numbers = [
        layout.of_inputs(torch.arange(layout.num_inputs).view(layout.input_shape)),
        layout.of_outputs(torch.arange(layout.num_outputs)),
    ]
    matrix = MatrixRun.of(index, numbers if is_here else ())
    return matrix, [matrix.matrix_of(each, layout.shape) for each in numbers if is_here]


def magnitude_sums(weights: Sequence[Summed], communicator: Communicator) -> list[list[Tensor]]:
    """Sum |w| of the live elements. Collective.

    Args:
        weights: this rank's part of every weight; the same list on all ranks.
        communicator: the ranks that have the parts.

    Returns:
        Per weight and kind of sum, fp64 [size]; bit-equal on all ranks and on every sharding.

    Raises:
        ValueError: an element is NaN or infinite; names its weight. On every rank.

    Cost: two reads of the weights; two all-reduces of 8 bytes per sum.
    """
    sizes = [size for weight in weights for size in weight.sizes]
    bits = communicator.reduce(sum(sizes), lambda: _reduced(weights, None), "max")
    largest = bits.view(torch.float64)
    for what, is_wrong in (("nan", torch.isnan), ("infinite", torch.isinf)):
        flags = _per_weight(is_wrong(largest), weights)
        names = [
            weight.part.name
            for weight, own in zip(weights, flags, strict=True)
            if any(bool(each.any()) for each in own)
        ]
        if names:
            text = "the sum of its magnitudes is not finite; expected finite weights."
            raise UnfitScores(f"{', '.join(names)}: {text}", what, names)
    exponents = torch.frexp(largest).exponent
    totals = communicator.reduce(
        sum(sizes), lambda: _reduced(weights, _per_weight(exponents, weights))
    )
    sums = totals.double()
    for scale in _powers(exponents - exact_sums.GRID_BITS):
        sums *= scale
    return _per_weight(sums, weights)


def _per_weight(values: Tensor, weights: Sequence[Summed]) -> list[list[Tensor]]:
    parts = iter(torch.split(values, [size for weight in weights for size in weight.sizes]))
    return [[next(parts) for _ in weight.sizes] for weight in weights]


def _reduced(weights: Sequence[Summed], exponents: list[list[Tensor]] | None) -> Tensor:
    """This rank's largest bits of |w|, or with exponents the sums in units of the grid: int64."""
    results, calls, num_bytes = [], [], 0
    lock = threading.Lock()
    for position, weight in enumerate(weights):
        out = [torch.zeros(size, dtype=torch.int64) for size in weight.sizes]
        results += out
        own = None if exponents is None else exponents[position]
        device = weight.part.device
        if weight.part.counted and not memory.takes_numpy(device):
            out = [each.to(device) for each in out]
            results[-len(out) :] = out
            own = None if own is None else [each.to(device) for each in own]
        visit = _visit if memory.takes_numpy(device) else _visit_on_device
        for span in spans_of(weight.part.counted, device, 8):
            calls.append(partial(visit, weight, span, own, out, lock))
            num_bytes += 8 * len(span)
    parts = [weight.part for weight in weights]
    is_safe = all(p.scores.is_thread_safe and kernels_on(p.device).USES_THREADS for p in parts)
    call_all(calls, num_threads(num_bytes, len(calls)) if is_safe else 1)
    return torch.cat([each.cpu() for each in results]) if results else torch.zeros(0).long()


def _visit(
    weight: Summed,
    span: range,
    exponents: list[Tensor] | None,
    out: list[Tensor],
    lock: threading.Lock,
    scratch: Scratch,
) -> None:
    part = weight.part
    wide = widened(part.scores.load(span.start, span.stop, scratch), scratch, part.dtype)
    magnitudes = np.abs(wide, out=scratch.array("magnitudes", wide.size, np.float64))
    if part.live is not None:
        magnitudes[~live_array(part.live, span, scratch)] = 0.0
    if part.keeps_nan:
        magnitudes[np.isnan(magnitudes)] = 0.0
    for block in weight.matrix.blocks(span.start, span.stop):
        shape = (block.rows.stop - block.rows.start, block.columns.stop - block.columns.start)
        values = magnitudes[block.start : block.stop].reshape(shape)
        for kind, places in enumerate(weight.places):
            place = slice_of(places, block)
            axes = tuple(axis for axis in (0, 1) if place.shape[axis] == 1)
            if exponents is None:
                found = values.max(axis=axes, keepdims=True).view(np.int64)
                combine: Callable[..., None] = np.maximum.at
            else:
                terms = _on_grid(values, exponents[kind].numpy()[place], scratch)
                found, combine = terms.sum(axis=axes, keepdims=True), np.add.at
            with lock:
                combine(out[kind].numpy(), place, found)


def _on_grid(values: Array, exponents: Array, scratch: Scratch) -> Array:
    """Magnitudes as whole numbers of units of the grid of their sum: int64."""
    terms = scratch.array("terms", values.size, np.float64).reshape(values.shape)
    first, second = _powers(torch.from_numpy(exact_sums.GRID_BITS - exponents))
    np.multiply(values, first.numpy(), out=terms)
    np.multiply(terms, second.numpy(), out=terms)
    np.rint(terms, out=terms)
    return terms.astype(np.int64)


def _powers(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Two powers of two whose product is 2**exponent, which by itself might overflow: float64."""
    half = exponents.long() // 2
    first, second = (((each + 1023) << 52) for each in (half, exponents.long() - half))
    return first.view(torch.float64), second.view(torch.float64)


def _visit_on_device(
    weight: Summed,
    span: range,
    exponents: list[Tensor] | None,
    out: list[Tensor],
    lock: threading.Lock,
    scratch: Scratch,
) -> None:
    part = weight.part
    magnitudes = part.scores.load(span.start, span.stop, scratch).double().abs()
    live = live_flags(part, span)
    if live is not None:
        magnitudes = magnitudes.where(live, 0.0)
    positions = torch.arange(span.start, span.stop, device=part.device)
    matrices, rows, columns = weight.matrix.places(positions)
    for kind, places in enumerate(weight.places):
        own = places.to(part.device)
        place = own[
            matrices if own.shape[0] > 1 else 0,
            rows if own.shape[1] > 1 else 0,
            columns if own.shape[2] > 1 else 0,
        ].expand(magnitudes.shape)
        if exponents is None:
            out[kind].scatter_reduce_(0, place, magnitudes.view(torch.int64), "amax")
        else:
            first, second = _powers(exact_sums.GRID_BITS - exponents[kind][place])
            terms = (magnitudes * first * second).round_()
            out[kind].index_add_(0, place, terms.long())
