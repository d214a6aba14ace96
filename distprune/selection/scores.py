"""Where the scores of a local shard come from, chunk by chunk: tensors, functions, small factors.

A :class:`ScoreSource` gives scores as floats; ``keys.ScoreKeys`` makes keys of them. Nothing here
stores a score per element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.exact_sums import product_dtype, scale_scores
from distprune.base.memory import Array, Runs, Scratch
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import Block, MatrixRun
from distprune.shards.shard import Shard

# The array that scores are computed in. Keys are made of them in place: see keys.ScoreKeys.
_USE = "keys"


class ScoreSource(Protocol):
    """Scores of one local shard.

    Attributes:
        dtype: of the scores.
        is_thread_safe: whether several threads may load chunks at a time.
        is_in_memory: whether a load computes nothing and takes no memory.
    """

    dtype: torch.dtype
    is_thread_safe: bool
    is_in_memory: bool

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        """Scores of flat positions [start, stop), 1-d; valid until the scratch is used again."""
        ...

    def gather(self, runs: Runs) -> Tensor:
        """Scores of some runs of elements, 1-d: a new tensor."""
        ...


class TensorScores:
    """The elements of a flat tensor.

    Args:
        scores: 1-d, contiguous.
    """

    is_thread_safe = True
    is_in_memory = True

    def __init__(self, scores: Tensor) -> None:
        self._scores = scores.detach()
        self._size = scores.numel()
        self.dtype = scores.dtype

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        if start == 0 and stop >= self._size:  # a slice costs as much as comparing 4096 elements
            return self._scores
        return self._scores[start:stop]

    def gather(self, runs: Runs) -> Tensor:
        return runs.of(self._scores)


class ComputedScores:
    """Scores that a user's function computes from flat values.

    Args:
        values: 1-d.
        function: elementwise.
        dtype: of what the function returns.
    """

    # Calls a user's function.
    is_thread_safe = False
    is_in_memory = False

    def __init__(
        self, values: Tensor, function: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> None:
        self._values = values
        self._function = function
        self.dtype = dtype

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        return self._function(self._values[start:stop]).detach()

    def gather(self, runs: Runs) -> Tensor:
        return self._function(runs.of(self._values)).detach()


class FactorScores:
    """Scores |w| * m: m is a sum of products of small factors.

    Args:
        values: the elements w.
        matrix: how they lie in the matrices that the factors broadcast to.
        make_terms: returns the terms of m, each a list of factors
            [matrices or 1, rows or 1, columns or 1] of the dtype of the scores.
        are_signed: whether the order of signed scores matters. If only that of |score| does, the
            scores are w * m, which saves a pass.
    """

    is_in_memory = False

    def __init__(
        self,
        values: ScoreSource,
        matrix: MatrixRun,
        make_terms: Callable[[], list[list[Tensor]]],
        *,
        are_signed: bool,
    ) -> None:
        self.dtype = torch.promote_types(values.dtype, torch.float32)
        self.is_thread_safe = values.is_thread_safe
        self._are_signed = are_signed
        self._values = values
        self._matrix = matrix
        self._make_terms = make_terms

    @classmethod
    def of_shard(cls, shard: Shard, factored: FactoredScores, *, are_signed: bool) -> FactorScores:
        """The scores of ``FactoredScores`` for a local shard.

        Raises:
            NotImplementedError: values that are no floating-point numbers.
        """
        if not shard.values.dtype.is_floating_point:
            raise NotImplementedError(
                f"{shard.name}: FactoredScores of values of dtype {shard.values.dtype}; expected "
                "floating point."
            )
        dtype = torch.promote_types(shard.values.dtype, torch.float32)
        matrix = MatrixRun.of(shard.index, [factor for term in factored.terms for factor in term])
        device = shard.values.device
        terms = terms_on(matrix, factored, shard.shape, device, dtype)
        values = TensorScores(shard.flat(shard.values))
        return cls(values, matrix, lambda: terms, are_signed=are_signed)

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        scratch = scratch or Scratch()
        values = self._values.load(start, stop, scratch)
        if not memory.takes_numpy(values.device):
            return self._at(values, torch.arange(start, stop, device=values.device))
        terms = self._make_terms()
        scores = float_array(scratch, values.numel(), self.dtype)
        weights = widened(values, scratch, self.dtype)
        if self._are_signed:
            weights = np.abs(weights, out=scratch.array("magnitudes", weights.size, weights.dtype))
        for block in self._matrix.blocks(start, stop):
            shape = (block.rows.stop - block.rows.start, block.columns.stop - block.columns.start)
            part = slice(block.start, block.stop)
            out = scores[part].reshape(shape)
            _score(terms, block, weights[part].reshape(shape), out, scratch)
        return torch.from_numpy(scores)

    def gather(self, runs: Runs) -> Tensor:
        values = self._values.gather(runs)
        return self._at(values, runs.positions(values.device))

    def _at(self, values: Tensor, positions: Tensor) -> Tensor:
        if not values.numel():  # then a factor may have no elements to index
            return values.to(self.dtype)
        matrices, rows, columns = self._matrix.places(positions)
        multiplier: Tensor | None = None
        for term in self._make_terms():
            product: Tensor | None = None
            for factor in term:
                part = factor[
                    matrices if factor.shape[0] > 1 else 0,
                    rows if factor.shape[1] > 1 else 0,
                    columns if factor.shape[2] > 1 else 0,
                ]
                product = part if product is None else product * part
            assert product is not None
            multiplier = product if multiplier is None else multiplier + product
        assert multiplier is not None
        return multiplier * (values.abs() if self._are_signed else values).to(self.dtype)


class ScaledScores:
    """Scores of another source times a number, rounded once to float32 or float64.

    Args:
        scores: floating point.
        scale: :func:`scale_of` the dtype of the result.
    """

    is_in_memory = False

    def __init__(self, scores: ScoreSource, scale: float) -> None:
        self._scores = scores
        self._scale = scale
        self.dtype = torch.promote_types(scores.dtype, torch.float32)
        self.is_thread_safe = scores.is_thread_safe

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        scores = self._scores.load(start, stop, scratch)
        if not memory.takes_numpy(scores.device):
            return self._scaled(scores)
        scratch = scratch or Scratch()
        out = float_array(scratch, scores.numel(), self.dtype)
        return torch.from_numpy(
            scale_scores(widened(scores, scratch, self.dtype), self._scale, out)
        )

    def gather(self, runs: Runs) -> Tensor:
        return self._scaled(self._scores.gather(runs))

    def _scaled(self, scores: Tensor) -> Tensor:
        product = scores.to(product_dtype(self._scale, self.dtype)) * self._scale
        return product.to(self.dtype)


def float_array(scratch: Scratch, size: int, dtype: torch.dtype) -> Array:
    """Scratch memory for scores, where keys can be made of them in place."""
    integer = np.dtype(f"int{8 * dtype.itemsize}")
    array: Array = scratch.array(_USE, size, integer).view(f"float{8 * dtype.itemsize}")
    return array


def widened(scores: Tensor, scratch: Scratch, dtype: torch.dtype) -> Array:
    """Floating-point scores on a CPU as float32 or float64, exactly; a view where they are that."""
    if scores.dtype is dtype:
        wide: Array = scores.numpy()
        return wide
    if scores.dtype is torch.bfloat16 and dtype is torch.float32:
        # The upper half of a float32; numpy has no such dtype.
        bits = scratch.array("wide", scores.numel(), np.uint32)
        np.left_shift(scores.view(torch.uint16).numpy(), 16, out=bits, dtype=np.uint32)
        upper: Array = bits.view(np.float32)
        return upper
    if scores.dtype is torch.bfloat16:
        scores = scores.float()
    converted = scratch.array("wide", scores.numel(), np.dtype(f"float{8 * dtype.itemsize}"))
    np.copyto(converted, scores.numpy())
    return converted


def scores_in_memory(shard: Shard, factored: FactoredScores) -> Tensor:
    """Factored scores as a tensor of the local shape, for methods that do not read in chunks."""
    source = FactorScores.of_shard(shard, factored, are_signed=True)
    flat = source.load(0, shard.values.numel())
    ordered = [shard.values.shape[dim] for dim in shard.order]
    inverse = sorted(range(len(shard.order)), key=shard.order.__getitem__)
    return flat.view(ordered).permute(inverse)


def slice_of(factor: Tensor, block: Block) -> Array:
    """The part of a factor that meets a block: [rows or 1, columns or 1]."""
    matrix = block.matrix if factor.shape[0] > 1 else 0
    rows = block.rows if factor.shape[1] > 1 else slice(None)
    columns = block.columns if factor.shape[2] > 1 else slice(None)
    part: Array = factor[matrix, rows, columns].numpy()
    return part


def _score(
    all_terms: list[list[Tensor]], block: Block, weights: Array, out: Array, scratch: Scratch
) -> None:
    """Write the scores of a block: all arrays are [rows, columns]."""
    terms = [[slice_of(factor, block) for factor in term] for term in all_terms]
    if len(terms) == 1 and len(terms[0]) == 1:
        np.multiply(weights, terms[0][0], out=out)
        return
    _multiply(terms[0], out)
    for factors in terms[1:]:
        product = factors[0]
        if len(factors) > 1:
            product = scratch.array("term", out.size, out.dtype).reshape(out.shape)
            _multiply(factors, product)
        np.add(out, product, out=out)
    np.multiply(weights, out, out=out)


def _multiply(factors: list[Array], out: Array) -> None:
    if len(factors) == 1:
        np.copyto(out, factors[0])
        return
    np.multiply(factors[0], factors[1], out=out)
    for factor in factors[2:]:
        np.multiply(out, factor, out=out)


def terms_on(
    matrix: MatrixRun,
    factored: FactoredScores,
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[Tensor]]:
    """The terms of scores of a parameter of that shape, as :class:`FactorScores` takes them."""
    return [
        _products([matrix.matrix_of(each.detach().to(device, dtype), shape) for each in term])
        for term in factored.terms
    ]


def _products(factors: list[Tensor]) -> list[Tensor]:
    """The factors of a term, with those multiplied in advance whose product is no larger."""
    product = factors[0]
    for position, factor in enumerate(factors[1:], 1):
        sizes = [max(pair) for pair in zip(product.shape, factor.shape, strict=True)]
        if sizes not in (list(product.shape), list(factor.shape)):
            return [product, *factors[position:]]
        product = product * factor
    return [product]
