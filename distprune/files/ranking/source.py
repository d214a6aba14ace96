"""The selected tensors of a plan as what selection ranks: parts with keys that are read on demand.

What is ranked are *items*: elements or, with a pattern of tiles, tiles.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from distprune._common.exact_sums import scale_of
from distprune._common.hashing import draw_seed
from distprune._common.input_factors import deviation_of_inputs, rms_of_inputs
from distprune._common.memory import Array
from distprune.files.disk.open_files import OpenFiles
from distprune.files.formats.statistics_file import StoredStatistics
from distprune.files.planning import Plan
from distprune.files.ranking.groups import bands_of
from distprune.files.ranking.tiles import Bands, TileScores
from distprune.files.ranking.values import FileValues
from distprune.selection.candidates import Candidates, KeySource
from distprune.selection.keys import (
    RANDOM_KEYS,
    KeyRange,
    Order,
    RandomKeys,
    ScoreKeys,
    key_range,
)
from distprune.selection.scores import FactorScores, ScaledScores, ScoreSource
from distprune.shards.geometry import IndexMap, MatrixRun

CPU = torch.device("cpu")


class Source:
    """The selected tensors of a plan, and the keys that they are ranked by.

    Args:
        plan: what to prune.
        did: called with the number of bytes after each read of scores.
    """

    def __init__(self, plan: Plan, did: Callable[[int], None] = lambda num_bytes: None) -> None:
        self.files = OpenFiles(os.O_RDONLY)
        self._plan = plan
        self._did = did
        self._range_of_group: dict[int, KeyRange] = {}
        paths = {file.name: file.path for file in plan.checkpoint.files}
        self._values = [
            FileValues(self.files, paths[tensor.entry.file], tensor.entry, did)
            for tensor in plan.tensors
        ]
        self._seed = _hash_seed(plan.recipe.seed)
        self._latest: tuple[int, torch.Tensor] | None = None
        self._raw = [self._raw_scores(position) for position in range(len(plan.tensors))]
        self._divisors: Sequence[float | None] = ()

    def divide(self, divisors: Sequence[float | None]) -> None:
        """Rank normalised scores from now on: per tensor, what its scores are divided by."""
        self._divisors = divisors
        self._range_of_group.clear()

    def bands(self, position: int) -> Bands | None:
        """The bands of a tensor whose tiles are ranked; None if its elements are."""
        return bands_of(self._plan.tensors[position], self._plan.recipe_of(position))

    def num_items(self, position: int) -> int:
        """How many elements, or tiles, of a tensor are ranked."""
        size = self._plan.recipe_of(position).group_rule.tile_size
        return self._plan.tensors[position].entry.numel // size

    def is_random(self, position: int) -> bool:
        """Whether the keys of a tensor do not depend on what is stored."""
        return self._plan.recipe_of(position).score == "random"

    def raw_scores(self, position: int) -> ScoreSource:
        """The scores of a tensor's items before they are divided."""
        return self._raw[position]

    def scores(self, position: int) -> ScoreSource:
        """The scores that a tensor's items are ranked by."""
        return self.divided(position, self._raw[position])

    def divided(self, position: int, raw: ScoreSource) -> ScoreSource:
        """Raw scores of a tensor, divided as :meth:`divide` said."""
        divisor = self._divisors[position] if position < len(self._divisors) else None
        if divisor is None:
            return raw
        dtype = torch.promote_types(raw.dtype, torch.float32)
        return ScaledScores(raw, scale_of(divisor, dtype))

    def key_range(self, position: int) -> KeyRange:
        """The keys that a tensor is ranked by: those of its group, if it is not ranked alone."""
        if self.is_random(position):
            return RANDOM_KEYS
        tensor = self._plan.tensors[position]
        group = self._plan.groups[tensor.group]
        if not group.recipe.is_together:
            return key_range(self.scores(position).dtype, Order.MAGNITUDE)
        if tensor.group not in self._range_of_group:
            dtypes = [self.scores(p).dtype for p in range(group.first, group.last)]
            common = functools.reduce(torch.promote_types, dtypes)
            self._range_of_group[tensor.group] = key_range(common, Order.MAGNITUDE)
        return self._range_of_group[tensor.group]

    def part(
        self, position: int, counted: range | None = None, scores: ScoreSource | None = None
    ) -> Candidates:
        """A tensor as selection sees it.

        Args:
            counted: the items that this rank counts; None: all.
            scores: of the items, instead of :meth:`scores`.
        """
        num_items = self.num_items(position)
        index = IndexMap((range(num_items),), (1,), 0, dims=(0,))
        keys: KeySource
        if self.is_random(position):
            offset = self._plan.tensors[position].offset
            keys = RandomKeys(self._seed, offset, index, CPU)
        else:
            keys = ScoreKeys(scores or self.scores(position), self.key_range(position))
        counted = range(num_items) if counted is None else counted
        return Candidates(keys, None, index, counted, num_items, num_items, CPU)

    def read_bits(self, position: int, first: int, last: int) -> Array:
        """The elements [first, last) as they are stored: unsigned integers, a fresh array."""
        return self._values[position].read_bits(first, last)

    def holding(self, position: int, first: int, bits: Array) -> AbstractContextManager[None]:
        """Compute scores of elements that were read already without another read."""
        return self._values[position].holding(first, bits)

    def itemsize(self, position: int) -> int:
        """Bytes of a stored element."""
        return self._values[position].dtype.itemsize

    def close(self) -> None:
        self.files.close()

    def _raw_scores(self, position: int) -> ScoreSource:
        recipe, entry = self._plan.recipe_of(position), self._plan.tensors[position].entry
        inputs = self._plan.inputs
        scores: ScoreSource = self._values[position]
        if recipe.score == "given":
            assert inputs.given is not None
            given = inputs.given.entries[entry.name]
            paths = {file.name: file.path for file in inputs.given.checkpoint.files}
            scores = FileValues(self.files, paths[given.file], given, self._did)
        elif recipe.needs_statistics:
            assert inputs.statistics is not None
            stored = inputs.statistics.of_tensor[entry.name]
            matrix, shape = _matrices(stored, entry.numel)
            dtype = torch.promote_types(scores.dtype, torch.float32)

            def make_terms() -> list[list[torch.Tensor]]:
                # Tensors are read one after the other: only the latest factor is kept.
                if self._latest is None or self._latest[0] != position:
                    factor = _factor(stored, recipe.score).to(dtype).reshape(shape)
                    self._latest = position, factor
                return [[self._latest[1]]]

            scores = FactorScores(scores, matrix, make_terms, are_signed=False)
        bands = self.bands(position)
        return scores if bands is None else TileScores(scores, bands)


def _hash_seed(seed: int | None) -> int:
    """The seed of hashes that ``RandomUnstructured`` draws after ``torch.manual_seed(seed)``."""
    return int(draw_seed(torch.Generator().manual_seed(seed or 0)))


def _factor(stored: StoredStatistics, score: str) -> torch.Tensor:
    """What elements are multiplied by, for each input; float32."""
    squares = torch.from_numpy(stored.squares)
    if score == "wanda":
        return rms_of_inputs(squares, stored.num_tokens).float()
    sums = torch.from_numpy(stored.sums)
    return deviation_of_inputs(sums, squares, stored.num_tokens).float()


def _matrices(stored: StoredStatistics, numel: int) -> tuple[MatrixRun, tuple[int, int, int]]:
    """A weight as matrices [matrices, rows, columns], and the shape of the factor of its inputs::

    [out, in]                one matrix; a factor for each column
    [in, out]                one matrix; a factor for each row
    convolution, g groups    g matrices [out / g, in / g * kernel]
    [experts, out, in]       a matrix for each expert
    [experts, in, out]       the same, with a factor for each row
    """
    num_inputs = math.prod(stored.input_shape)
    count = {"experts": stored.shape[0], "transposed_experts": stored.shape[0]}.get(
        stored.layout, stored.groups
    )
    num_columns = num_inputs // max(1, count)
    num_rows = numel // max(1, num_inputs)
    shape = count, 1, num_columns
    if stored.layout in ("conv1d_of_transformers", "transposed_experts"):
        num_rows, num_columns = num_columns, num_rows
        shape = count, num_rows, 1
    sizes = (count, num_rows, num_columns)
    index = IndexMap(
        tuple(map(range, sizes)), (num_rows * num_columns, num_columns, 1), 0, 0, (0, 1, 2)
    )
    return MatrixRun(max(1, num_rows), max(1, num_columns), 2, 0, index), shape
