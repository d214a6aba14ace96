"""Scores that are no magnitudes, for a few megabytes of elements at a time.

A scorer gives the numbers that the elements of one tensor are ranked by, as bits of a format of
``float_formats``. From there on, everything is done with them as with weights: their magnitudes are
ranked, normalised or not. No score is stored.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from distprune._common.float_formats import PLAIN_FLOATS, unsigned_type
from distprune._common.input_factors import deviation_of_inputs, rms_of_inputs
from distprune.files.disk.open_files import OpenFiles, read_into
from distprune.files.formats.header import TensorEntry
from distprune.files.formats.statistics_file import StoredStatistics
from distprune.files.planning import Plan
from distprune.files.ranking.keys import Array, bits_dtype, widened


class Scorer(Protocol):
    """The scores of one tensor.

    Attributes:
        dtype: their format, as headers spell it.
        needs_weights: whether they depend on the weights.
    """

    dtype: str
    needs_weights: bool

    def score_bits(self, first: int, last: int, weights: Array | None) -> Array:
        """The scores of the elements [first, last), as unsigned integers; a fresh array.

        Args:
            first, last: elements of the tensor.
            weights: the bits of these elements; may be None if they are not needed.

        Raises:
            CheckpointError: a file of scores cannot be read.
        """
        ...


def scorers_of(plan: Plan, files: OpenFiles) -> list[Scorer | None]:
    """The scorer of each tensor of a plan; None: it is ranked by magnitude, or at random.

    Args:
        plan: with its inputs.
        files: opens files of scores.

    Memory: 4 bytes for each input of one tensor (8 for fp64 weights) while it is read.
    """
    inputs = plan.inputs
    paths = {}
    if inputs.given is not None:
        paths = {file.name: file.path for file in inputs.given.checkpoint.files}
    latest = _LatestFactor()
    scorers: list[Scorer | None] = []
    for position, tensor in enumerate(plan.tensors):
        score, entry = plan.recipe_of(position).score, tensor.entry
        scorer: Scorer | None = None
        if score == "given":
            assert inputs.given is not None
            scores = inputs.given.entries[entry.name]
            scorer = _Given(scores, paths[scores.file], files)
        elif score in ("wanda", "stade"):
            assert inputs.statistics is not None
            scorer = _OfInputs(entry, inputs.statistics.of_tensor[entry.name], score, latest)
        scorers.append(scorer)
    return scorers


class _Given:
    """Scores that are read from a file."""

    needs_weights = False

    def __init__(self, scores: TensorEntry, path: str, files: OpenFiles) -> None:
        self.dtype = scores.dtype
        self._start = scores.start
        self._path = path
        self._files = files

    def score_bits(self, first: int, last: int, weights: Array | None) -> Array:
        dtype = bits_dtype(self.dtype)
        bits = np.empty(last - first, dtype=dtype)
        offset = self._start + first * dtype.itemsize
        read_into(self._files, self._path, offset, bits.data.cast("B"))
        return bits


class _LatestFactor:
    """The factor of the tensor that was read last: tensors are read one after the other."""

    def __init__(self) -> None:
        self._owner: _OfInputs | None = None
        self._factor: Array = np.empty(0)

    def of(self, owner: _OfInputs) -> Array:
        if self._owner is not owner:
            self._factor = owner.factor()
            self._owner = owner
        return self._factor


class _OfInputs:
    """w times a number of its input, in float32 (float64 for fp64 weights).

    The arithmetic is that of ``selection.scores.FactorScores``: the factor is rounded to float32,
    and the product once.

    The tensor is [blocks, rows, columns], row-major, and each block has a factor for each column::

        [out, in]                one block of rows [in]
        [in, out]                a block of one column for each input
        convolution, g groups    g blocks of rows [in / g, *kernel]
        [experts, out, in]       a block of rows [in] for each expert
        [experts, in, out]       a block of one column for each input of each expert
    """

    needs_weights = True

    def __init__(
        self, entry: TensorEntry, stored: StoredStatistics, score: str, latest: _LatestFactor
    ) -> None:
        self._stored = stored
        self._score = score
        self._latest = latest
        self._weight_dtype = entry.dtype
        self.dtype = "F64" if entry.dtype == "F64" else "F32"
        self._float = np.dtype(f"f{PLAIN_FLOATS[self.dtype].num_bytes}")
        blocks, columns = stored.groups, math.prod(stored.shape[1:])
        if stored.layout == "experts":
            blocks, columns = stored.input_shape
        elif stored.layout in ("conv1d_of_transformers", "transposed_experts"):
            blocks, columns = math.prod(stored.input_shape), 1
        self._shape = blocks, columns
        self._rows = entry.numel // max(blocks * columns, 1)

    def factor(self) -> Array:
        """[blocks, columns]: what elements are multiplied by."""
        squares, num_tokens = torch.from_numpy(self._stored.squares), self._stored.num_tokens
        if self._score == "wanda":
            factor = rms_of_inputs(squares, num_tokens)
        else:
            factor = deviation_of_inputs(torch.from_numpy(self._stored.sums), squares, num_tokens)
        rounded: Array = factor.float().numpy().astype(self._float)
        return rounded.reshape(self._shape)

    def score_bits(self, first: int, last: int, weights: Array | None) -> Array:
        assert weights is not None
        width = 8 * self._float.itemsize
        wide = widened(weights, self._weight_dtype, width).view(self._float)
        # Without a conversion they are the weights, which are still needed.
        scores = wide if wide.itemsize > weights.itemsize else np.empty_like(wide)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            self._multiply(wide, scores, first)
        return scores.view(unsigned_type(width))

    def _multiply(self, values: Array, out: Array, first: int) -> None:
        """Multiply elements from ``first`` on: parts of blocks, and whole blocks at once."""
        factors = self._latest.of(self)
        columns = factors.shape[1]
        block = self._rows * columns
        start = 0
        while start < len(values):
            number, inside = divmod(first + start, block)
            num_whole = 0 if inside else (len(values) - start) // block
            if num_whole > 1:
                stop = start + num_whole * block
                shape = (num_whole, self._rows, columns)
                factor = factors[number : number + num_whole, None]
                np.multiply(
                    values[start:stop].reshape(shape), factor, out=out[start:stop].reshape(shape)
                )
            else:
                stop = min(start + block - inside, len(values))
                _multiply_rows(
                    values[start:stop], factors[number], out[start:stop], inside % columns
                )
            start = stop


def _multiply_rows(values: Array, factor: Array, out: Array, column: int) -> None:
    """Multiply the elements of rows from a column on by a factor for each column."""
    columns = len(factor)
    head = min((columns - column) % columns, len(values))
    np.multiply(values[:head], factor[column : column + head], out=out[:head])
    num_rows = (len(values) - head) // columns
    tail = head + num_rows * columns
    shape = (num_rows, columns)
    np.multiply(values[head:tail].reshape(shape), factor, out=out[head:tail].reshape(shape))
    np.multiply(values[tail:], factor[: len(values) - tail], out=out[tail:])
