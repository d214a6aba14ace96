"""Scores of a local shard, and integers of the same order, which rank exactly on every device.

A :class:`ScoreSource` reads or computes scores chunk by chunk, from tensors, functions or small
factors. Nothing here stores a score per element.

[Note: keys] The bits of a non-negative IEEE number, read as an integer, are in
the order of the numbers. So |x| becomes a key by clearing the sign bit: -0.0
equals 0.0, denormals stay distinct whatever the flush-to-zero mode, and inf is
the largest number. All NaN share one key above inf, where torch.topk has them.
Ranking compares keys as integers, and makes no other comparison.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune.base import memory
from distprune.base.exact_sums import product_dtype, scale_of, scale_scores
from distprune.base.memory import INTEGERS, LARGEST_HASH, SERIAL, Array, Scratch
from distprune.base.selecting import PLAIN_FLOATS, FloatFormat
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import Block, IndexMap, MatrixRun
from distprune.shards.shard import Shard

_FLOATS: dict[torch.dtype, FloatFormat] = {
    getattr(torch, form.torch_name): form for form in PLAIN_FLOATS.values()
}
# Integers are widened first where |min| would overflow.
_INTEGERS = {
    torch.bool: torch.int16,
    torch.uint8: torch.int16,
    torch.int8: torch.int16,
    torch.int16: torch.int32,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
}


@dataclass(frozen=True)
class KeyRange:
    """The integers that the keys of one call lie in.

    Attributes:
        dtype: of the keys.
        low, high: smallest and largest key, NaN's included.
        largest_number: the largest key that is not NaN's.
        value_dtype: of the scores, to show a key as a score.
        signed: whether the lowest scores rank first; else those of the smallest |score|.
    """

    dtype: torch.dtype
    low: int
    high: int
    largest_number: int
    value_dtype: torch.dtype
    signed: bool

    @property
    def is_float(self) -> bool:
        """Whether scores can be NaN."""
        return self.high > self.largest_number

    def score_of(self, key: int) -> float:
        """The score that a key stands for (|score| if they are not signed)."""
        if not self.is_float:
            return float(key)
        if key > self.largest_number:
            return float("nan")
        magnitude = torch.tensor(abs(key), dtype=self.dtype).view(self.value_dtype).item()
        return -magnitude if key < 0 else magnitude


RANDOM_KEYS = KeyRange(torch.int64, 0, LARGEST_HASH, LARGEST_HASH, torch.int64, True)


def key_range(dtype: torch.dtype, *, signed: bool = False) -> KeyRange:
    """The keys of scores of a dtype.

    Raises:
        NotImplementedError: a dtype that has no order here (complex, float8, quantised).
    """
    if dtype in _FLOATS:
        key_dtype, inf = INTEGERS[dtype.itemsize], _FLOATS[dtype].inf
        low = -inf if signed else 0
        return KeyRange(key_dtype, low, inf + 1, inf, dtype, signed)
    if dtype in _INTEGERS:
        key_dtype = _INTEGERS[dtype]
        # int64 has no wider type: |min| stays negative there, as in torch.abs.
        bound = torch.iinfo(key_dtype).max - 1
        return KeyRange(key_dtype, -bound, bound, bound, dtype, signed)
    supported = ", ".join(str(rankable) for rankable in (*_FLOATS, *_INTEGERS))
    raise NotImplementedError(
        f"scores of dtype {dtype} cannot be ranked; expected one of {supported}. "
        "Pass importance_scores of one of these."
    )


def to_keys(
    scores: Tensor, common: KeyRange, scratch: Scratch | None = None
) -> tuple[Tensor, bool]:
    """Keys of scores, 1-d: see [Note: keys]. In scratch memory, if there is some.

    Returns:
        The keys, and whether some of them may be NaN's.
    """
    if common is RANDOM_KEYS:
        return scores, False
    if not common.is_float:
        keys = scores.to(common.dtype, copy=True)
        if not common.signed:
            keys.abs_()
        return keys, False
    bits = scores.to(common.value_dtype).contiguous().view(common.dtype)
    if memory.takes_numpy(bits.device):
        return _float_keys(bits.numpy(), common, scratch or Scratch())
    keys = torch.bitwise_and(bits, torch.iinfo(common.dtype).max).clamp_(max=common.high)
    if common.signed:
        keys = torch.where((bits < 0) & (keys <= common.largest_number), -keys, keys)
    return keys, True


def _float_keys(bits: Array, common: KeyRange, scratch: Scratch) -> tuple[Tensor, bool]:
    """The same operations by numpy, which has no OpenMP barrier per small call."""
    integer = bits.dtype.type
    negative = bits < 0 if common.signed else None
    # Scores that were computed lie in the same memory.
    keys = scratch.array("keys", bits.size, bits.dtype)
    np.bitwise_and(bits, integer((1 << (8 * bits.itemsize - 1)) - 1), out=keys)
    has_nan = int(keys.max(initial=0)) > common.largest_number
    if has_nan:  # seldom: finding out takes less time than clamping all
        np.minimum(keys, integer(common.high), out=keys)
    if negative is not None:
        np.negative(keys, out=keys, where=negative & (keys <= integer(common.largest_number)))
    return torch.from_numpy(keys), has_nan


# The array that scores are computed in: keys are made of them in place, see to_keys.
_USE = "keys"


def select(flat: Tensor, index: Tensor) -> Tensor:
    """``flat[index]`` for int64 positions or bool flags, 1-d, of the first dimension.

    On a CPU by numpy: torch spreads even this over threads, which wait for each other longer than
    it takes where cores are shared.
    """
    if not memory.takes_numpy(flat.device) or flat.itemsize not in INTEGERS:
        return flat[index]
    bits = flat.view(INTEGERS[flat.itemsize]).numpy()
    return torch.from_numpy(bits[index.numpy()]).view(flat.dtype)


@dataclass(frozen=True)
class Runs:
    """Some runs of equal length in a flat tensor.

         start                               stop
          |  0  |  1  |  2  |  3  |  4  |  5  | rest      runs of ``length`` elements

    Attributes:
        start, stop: the positions that are cut into runs; a rest shorter than a run is left out.
        length: of a run.
        numbers: int64 [m], of the runs that are meant.
    """

    start: int
    stop: int
    length: int
    numbers: Tensor

    def of(self, flat: Tensor) -> Tensor:
        """Their elements, [m * length]."""
        end = self.start + (self.stop - self.start) // self.length * self.length
        runs = flat[self.start : end].view(-1, self.length)
        return select(runs, memory.moved(self.numbers, flat.device)).view(-1)

    def positions(self, device: torch.device) -> Tensor:
        """Their positions in the tensor, int64 [m * length]."""
        starts = memory.moved(self.numbers, device).unsqueeze(1) * self.length
        return (starts + torch.arange(self.length, device=device)).view(-1) + self.start


class ScoreSource:
    """Scores of one local shard: the elements of a tensor, or what a function makes of them.

    Other sources, which define ``load`` and ``gather``, and the first four attributes, compute
    scores from files or from factors.

    Args:
        values: 1-d, contiguous.
        function: of a user, elementwise; None: the values are the scores.
        dtype: of what the function returns.

    Attributes:
        dtype: of the scores.
        size: how many there are.
        device: of the scores.
        is_thread_safe: whether several threads may load chunks at a time.
        tensor: all scores, if they are one.
    """

    dtype: torch.dtype
    size: int
    device: torch.device
    is_thread_safe = True
    tensor: Tensor | None = None

    def __init__(
        self,
        values: Tensor,
        function: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._flat, self._function = values, function
        self.dtype, self.size, self.device = dtype or values.dtype, values.shape[0], values.device
        if function is None:
            self.tensor = values
        else:
            self.is_thread_safe = False

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        """Scores of flat positions [start, stop), 1-d; valid until the scratch is used again."""
        return self._of(self._flat[start:stop])

    def gather(self, runs: Runs) -> Tensor:
        """Scores of some runs of elements, 1-d: a new tensor."""
        return self._of(runs.of(self._flat))

    def _of(self, values: Tensor) -> Tensor:
        return values if self._function is None else self._function(values).detach()


class FactorScores(ScoreSource):
    """Scores |w| * m: m is a sum of products of small factors.

    Args:
        values: the elements w.
        matrix: how they lie in the matrices that the factors broadcast to.
        make_terms: returns the terms of m, each a list of factors
            [matrices or 1, rows or 1, columns or 1] of the dtype of the scores.
        are_signed: whether the order of signed scores matters. If only that of |score| does, the
            scores are w * m, which saves a pass.
    """

    def __init__(
        self,
        values: ScoreSource,
        matrix: MatrixRun,
        make_terms: Callable[[], list[list[Tensor]]],
        *,
        are_signed: bool,
    ) -> None:
        self.dtype = torch.promote_types(values.dtype, torch.float32)
        self.size, self.device = values.size, values.device
        self.is_thread_safe = values.is_thread_safe
        self._values, self._are_signed = values, are_signed
        self._matrix, self._make_terms = matrix, make_terms

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
        matrix = MatrixRun(shard.index, [factor for term in factored.terms for factor in term])
        terms = terms_on(matrix, factored, shard.shape, shard.values.device, dtype)
        values = ScoreSource(shard.flat_values)
        return cls(values, matrix, lambda: terms, are_signed=are_signed)

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        scratch = scratch or Scratch()
        values = self._values.load(start, stop, scratch)
        if not memory.takes_numpy(self.device):
            return self._at(values, torch.arange(start, stop, device=values.device))
        terms = self._make_terms()
        scores = _float_array(scratch, values.numel(), self.dtype)
        weights = widened(values, scratch, self.dtype)
        if self._are_signed:
            weights = np.abs(weights, out=scratch.array("magnitudes", weights.size, weights.dtype))
        for block in self._matrix.blocks(start, stop):
            first, last, _, rows, columns = block
            shape = (rows.stop - rows.start, columns.stop - columns.start)
            out = scores[first:last].reshape(shape)
            factors = [[slice_of(factor, block).numpy() for factor in term] for term in terms]
            own = weights[first:last].reshape(shape)
            total = _product(factors[0], out)
            for term in factors[1:]:
                term_out = scratch.array("term", out.size, out.dtype).reshape(out.shape)
                total = np.add(total, _product(term, term_out), out=out)
            np.multiply(own, total, out=out)
        return torch.from_numpy(scores)

    def gather(self, runs: Runs) -> Tensor:
        values = self._values.gather(runs)
        return self._at(values, runs.positions(values.device))

    def _at(self, values: Tensor, positions: Tensor) -> Tensor:
        """The scores of values at some positions."""
        if not values.numel():  # then a factor may have no elements to index
            return values.to(self.dtype)
        places = self._matrix.places(positions)
        products = [
            functools.reduce(torch.mul, [factor_at(factor, places) for factor in term])
            for term in self._make_terms()
        ]
        multiplier = functools.reduce(torch.add, products)
        return multiplier * (values.abs() if self._are_signed else values).to(self.dtype)


class ScaledScores(ScoreSource):
    """Scores of another source divided by a number, rounded once to float32 or float64.

    Args:
        scores: floating point.
        divisor: one of ``sums.divisors_of``.
    """

    def __init__(self, scores: ScoreSource, divisor: float) -> None:
        self.dtype = torch.promote_types(scores.dtype, torch.float32)
        self._scores, self._scale = scores, scale_of(divisor, self.dtype)
        self.size, self.device = scores.size, scores.device
        self.is_thread_safe = scores.is_thread_safe

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        scores = self._scores.load(start, stop, scratch)
        if not memory.takes_numpy(self.device):
            return self._scaled(scores)
        scratch = scratch or Scratch()
        out = _float_array(scratch, scores.numel(), self.dtype)
        wide = widened(scores, scratch, self.dtype)
        return torch.from_numpy(scale_scores(wide, self._scale, out))

    def gather(self, runs: Runs) -> Tensor:
        return self._scaled(self._scores.gather(runs))

    def _scaled(self, scores: Tensor) -> Tensor:
        product = scores.to(product_dtype(self._scale, self.dtype)) * self._scale
        return product.to(self.dtype)


class RandomKeys(ScoreSource):
    """Random scores that are a function of (seed, global index) and of nothing else.

    They are keys as they are, in the range ``RANDOM_KEYS``.

    Args:
        seed: agreed by all ranks.
        offset: global index, over the list of parameters, of this parameter's first element.
        index: from local positions to indices in the parameter.
        size: local elements.
        device: of the keys.
    """

    dtype = torch.int64

    def __init__(
        self, seed: int, offset: int, index: IndexMap, size: int, device: torch.device
    ) -> None:
        self.size, self.device = size, device
        self._seed, self._offset, self._index = seed, offset, index

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        if not memory.takes_numpy(self.device):
            return self._at(torch.arange(start, stop, device=self.device))
        scratch = scratch or Scratch()
        keys = scratch.array(_USE, stop - start, np.int64)
        for first in range(start, stop, SERIAL):
            last = min(first + SERIAL, stop)
            indices = self._index(torch.arange(first, last)).numpy()
            np.add(indices, self._offset, out=keys[first - start : last - start])
        memory.hash_in_place(keys, self._seed, scratch)
        return torch.from_numpy(keys)

    def gather(self, runs: Runs) -> Tensor:
        return self._at(runs.positions(self.device))

    def _at(self, positions: Tensor) -> Tensor:
        return memory.hash_keys(self._index(positions) + self._offset, self._seed)


def random_keys(shards: Sequence[Shard], seed: int) -> tuple[KeyRange, list[ScoreSource]]:
    """Keys that are a function of the seed and of the place among all elements of the list."""
    sources: list[ScoreSource] = []
    offset = 0
    for shard in shards:
        values = shard.values
        sources.append(RandomKeys(seed, offset, shard.index, values.numel(), values.device))
        offset += shard.numel
    return RANDOM_KEYS, sources


def scores_in_memory(shard: Shard, factored: FactoredScores) -> Tensor:
    """Factored scores as a tensor of the local shape, for methods that do not read in chunks."""
    source = FactorScores.of_shard(shard, factored, are_signed=True)
    flat = source.load(0, shard.values.numel())
    ordered = [shard.values.shape[dim] for dim in shard.order]
    inverse = sorted(range(len(shard.order)), key=shard.order.__getitem__)
    return flat.view(ordered).permute(inverse)


def terms_on(
    matrix: MatrixRun,
    factored: FactoredScores,
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[Tensor]]:
    """The terms of scores of a parameter of that shape, as :class:`FactorScores` takes them.

    Of a term, the factors are multiplied in advance whose product is no larger than they are.
    """
    terms = []
    for term in factored.terms:
        first, *others = [matrix.matrix_of(f.detach().to(device, dtype), shape) for f in term]
        while others:
            sizes = [max(pair) for pair in zip(first.shape, others[0].shape, strict=True)]
            if sizes not in (list(first.shape), list(others[0].shape)):
                break
            first = first * others.pop(0)
        terms.append([first, *others])
    return terms


def widened(scores: Tensor, scratch: Scratch, dtype: torch.dtype) -> Array:
    """Floating-point scores on a CPU as float32 or float64, exactly; a view where they are that."""
    if scores.dtype is torch.bfloat16:
        # The upper half of a float32; numpy has no such dtype.
        bits = scratch.array("upper", scores.numel(), np.uint32)
        np.left_shift(scores.view(torch.uint16).numpy(), 16, out=bits, dtype=np.uint32)
        wide: Array = bits.view(np.float32)
    else:
        wide = scores.numpy()
    if wide.itemsize == dtype.itemsize:
        return wide
    converted = scratch.array("wide", wide.size, np.dtype(f"float{8 * dtype.itemsize}"))
    np.copyto(converted, wide)
    return converted


def slice_of(factor: Tensor, block: Block) -> Tensor:
    """The part of a factor that meets a block: [rows or 1, columns or 1]."""
    _, _, matrix, rows, columns = block
    count, height, width = factor.shape
    every = slice(None)
    return factor[
        matrix if count > 1 else 0, rows if height > 1 else every, columns if width > 1 else every
    ]


def factor_at(factor: Tensor, places: tuple[Tensor | int, Tensor, Tensor]) -> Tensor:
    """The elements of a factor at matrices, rows and columns: 1-d, or of one element."""
    return factor[tuple(p if size > 1 else 0 for p, size in zip(places, factor.shape, strict=True))]


def _float_array(scratch: Scratch, size: int, dtype: torch.dtype) -> Array:
    """Scratch memory for scores, where keys can be made of them in place."""
    integer = np.dtype(f"int{8 * dtype.itemsize}")
    return scratch.array(_USE, size, integer).view(f"float{8 * dtype.itemsize}")


def _product(factors: list[Array], out: Array) -> Array:
    """The product of factors that broadcast to ``out``, written there; of one, itself."""
    return functools.reduce(functools.partial(np.multiply, out=out), factors)
