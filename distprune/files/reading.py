"""The selected tensors of a plan as what selection ranks: parts with keys that are read on demand.

What is ranked are *items*: elements or, with a pattern of tiles, tiles.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distprune._common.blocks import Blocks
from distprune._common.exact_sums import scale_of
from distprune._common.float_formats import PLAIN_FLOATS
from distprune._common.hashing import draw_seed
from distprune._common.memory import Array, Runs, Scratch
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.checkpoints.statistics_file import EXPERT_LAYOUTS, StoredStatistics
from distprune.files.disk.access import OpenFiles, read_into
from distprune.files.planning import Plan, PlannedGroup, PlannedTensor
from distprune.files.recipe import FileRecipe
from distprune.files.team import Team
from distprune.files.tiles import Bands, TileScores
from distprune.selection.candidates import Candidates, KeySource
from distprune.selection.keys import (
    RANDOM_KEYS,
    KeyRange,
    Order,
    RandomKeys,
    ScoreKeys,
    key_range,
)
from distprune.selection.matrix_sums import Summed, magnitude_sums
from distprune.selection.normalizing import Scored
from distprune.selection.scores import FactorScores, ScaledScores, ScoreSource
from distprune.shards.factored import (
    POWER_OF_RIA,
    deviation_of_inputs,
    relative_importance,
    rms_of_inputs,
)
from distprune.shards.geometry import IndexMap, MatrixRun

CPU = torch.device("cpu")
_MOST_SUMS = 1 << 20  # that are added up at a time; each takes some 50 bytes until it is done


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
        self._latest: tuple[int, str, list[list[Tensor]]] | None = None
        self._sums: dict[int, list[Tensor]] = {}  # of |w|, by position: of inputs, of outputs
        self._raw = [self._raw_scores(position) for position in range(len(plan.tensors))]
        self._divisors: Sequence[float | None] = ()

    def add_up(self, team: Team) -> None:
        """Add up |w| along rows and columns, where scores are made of that. Collective.

        Raises:
            ValueError: a weight is NaN, without ``nan: keep``, or infinite; on every rank.

        Cost: two reads of these weights; two all-reduces of 8 bytes per input and output.
        """
        plan = self._plan
        positions = [p for p in range(len(plan.tensors)) if plan.recipe_of(p).score == "ria"]
        batch: list[int] = []
        num_sums = 0
        for position in positions:
            batch.append(position)
            num_sums += sum(self._matrices(position).sizes)
            if num_sums >= _MOST_SUMS or position == positions[-1]:
                found = magnitude_sums(self._summed(batch, team), team)
                self._sums |= zip(batch, found, strict=True)
                batch, num_sums = [], 0

    def _summed(self, positions: Sequence[int], team: Team) -> list[Summed]:
        """What this rank adds up of some weights."""
        sizes = [self._plan.tensors[position].entry.numel for position in positions]
        weights = []
        for position, share in zip(positions, team.shares(sizes), strict=True):
            matrices = self._matrices(position)
            part = self._scored(position, self._values[position], share)
            weights.append(Summed(part, matrices.run, matrices.places, matrices.sizes))
        return weights

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

    def scored(self, position: int, share: range) -> Scored:
        """A tensor as a normalisation sees it; ``share``: the items that this rank counts."""
        return self._scored(position, self._raw[position], share)

    def outlier_scores(self, position: int, share: range) -> Scored:
        """The same of the scores whose outliers OWL counts: Wanda's, whatever is ranked."""
        return self._scored(position, self._factored(position, "wanda"), share)

    def _scored(self, position: int, scores: ScoreSource, share: range) -> Scored:
        keeps_nan = self._plan.recipe.nan == "keep"
        name = self._plan.tensors[position].entry.name
        return Scored(name, scores, None, share, CPU, keeps_nan)

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
        if not group.recipe.is_global:
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
            scores = self._factored(position, recipe.score)
        bands = self.bands(position)
        return scores if bands is None else TileScores(scores, bands)

    def _factored(self, position: int, score: str) -> ScoreSource:
        """The scores of a tensor that are made of its weights and of statistics."""
        matrices, values = self._matrices(position), self._values[position]
        dtype = torch.promote_types(values.dtype, torch.float32)

        def make_terms() -> list[list[Tensor]]:
            # Tensors are read one after the other: only the latest factors are kept.
            if self._latest is None or self._latest[:2] != (position, score):
                terms = matrices.terms(score, self._sums.get(position, ()))
                terms = [[factor.float().to(dtype) for factor in term] for term in terms]
                self._latest = position, score, terms
            return self._latest[2]

        return FactorScores(values, matrices.run, make_terms, are_signed=False)

    def _matrices(self, position: int) -> _Matrices:
        entry, statistics = self._plan.tensors[position].entry, self._plan.inputs.statistics
        assert statistics is not None
        return _Matrices.of(statistics.of_tensor[entry.name], entry.numel)


def _hash_seed(seed: int | None) -> int:
    """The seed of hashes that ``RandomUnstructured`` draws after ``torch.manual_seed(seed)``."""
    return int(draw_seed(torch.Generator().manual_seed(seed or 0)))


@dataclass(frozen=True)
class _Matrices:
    """A weight as matrices [matrices, rows, columns]::

    [out, in]                one matrix; a factor for each column
    [in, out]                one matrix; a factor for each row
    convolution, g groups    g matrices [out / g, in / g * kernel]
    [experts, out, in]       a matrix for each expert
    [experts, in, out]       the same, with a factor for each row

    Attributes:
        stored: the statistics.
        shape: number of matrices, rows and columns.
        are_turned: whether the matrices are [in, out].
    """

    stored: StoredStatistics
    shape: tuple[int, int, int]
    are_turned: bool

    @classmethod
    def of(cls, stored: StoredStatistics, numel: int) -> _Matrices:
        num_inputs = math.prod(stored.input_shape)
        is_of_experts = stored.layout in EXPERT_LAYOUTS
        count = stored.shape[0] if is_of_experts else stored.groups
        own_inputs, own_outputs = num_inputs // max(1, count), numel // max(1, num_inputs)
        are_turned = stored.layout in ("conv1d_of_transformers", "transposed_experts")
        sizes = (own_inputs, own_outputs) if are_turned else (own_outputs, own_inputs)
        return cls(stored, (count, *sizes), are_turned)

    @property
    def run(self) -> MatrixRun:
        _, rows, columns = self.shape
        strides = (rows * columns, columns, 1)
        index = IndexMap(tuple(map(range, self.shape)), strides, 0, 0, (0, 1, 2))
        return MatrixRun(max(1, rows), max(1, columns), 2, 0, index)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many inputs there are, and how many outputs."""
        count, rows, columns = self.shape
        num_rows, num_columns = count * rows, count * columns
        return (num_rows, num_columns) if self.are_turned else (num_columns, num_rows)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """The number of the input, and of the output, of each element; they broadcast."""
        inputs, outputs = (torch.arange(size) for size in self.sizes)
        return self._of_inputs(inputs), self._of_outputs(outputs)

    def terms(self, score: str, sums: Sequence[Tensor]) -> list[list[Tensor]]:
        """What |w| is multiplied by, as :class:`FactorScores` takes it; float64.

        Args:
            score: "wanda", "stade" or "ria".
            sums: of |w|, for "ria": of each input and of each output.
        """
        stored = self.stored
        squares = torch.from_numpy(stored.squares)
        if score == "stade":
            deviation = deviation_of_inputs(
                torch.from_numpy(stored.sums), squares, stored.num_tokens
            )
            return [[self._of_inputs(deviation)]]
        norms = rms_of_inputs(squares, stored.num_tokens)
        if score == "wanda":
            return [[self._of_inputs(norms)]]
        norms = norms.reshape(-1) ** POWER_OF_RIA
        first, second = relative_importance(norms, *sums)
        return [[self._of_inputs(first)], [self._of_outputs(second), self._of_inputs(norms)]]

    def _of_inputs(self, values: Tensor) -> Tensor:
        count, rows, columns = self.shape
        return values.reshape((count, rows, 1) if self.are_turned else (count, 1, columns))

    def _of_outputs(self, values: Tensor) -> Tensor:
        count, rows, columns = self.shape
        return values.reshape((count, 1, columns) if self.are_turned else (count, rows, 1))


class FileValues:
    """The elements of a stored tensor, which are read when they are needed.

    Args:
        files: opens the files.
        path: of the file.
        entry: of the tensor.
        did: called with the number of bytes after each read.
    """

    # The files are opened and closed as they are needed, and progress is reported.
    is_thread_safe = False
    is_in_memory = False
    tally = None

    def __init__(
        self, files: OpenFiles, path: str, entry: TensorEntry, did: Callable[[int], None]
    ) -> None:
        self._files = files
        self._path = path
        self._entry = entry
        self._did = did
        self.dtype: torch.dtype = getattr(torch, PLAIN_FLOATS[entry.dtype].torch_name)
        self._bits = np.dtype(f"i{self.dtype.itemsize}")
        self._held: tuple[int, Array] | None = None

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        """The elements [start, stop).

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        if self._held is not None:
            first, bits = self._held
            if first <= start and stop <= first + len(bits):
                return self._as_tensor(bits[start - first : stop - first])
        bits = (scratch or Scratch()).array("read", stop - start, self._bits)
        self._read(start, bits)
        self._did(bits.nbytes)
        return self._as_tensor(bits)

    def gather(self, runs: Runs) -> Tensor:
        """The elements of some runs."""
        bits = np.empty((len(runs.numbers), runs.length), dtype=self._bits)
        starts = runs.start + runs.numbers.numpy() * runs.length
        offsets = (self._entry.start + starts * self._bits.itemsize).tolist()
        for row, offset in zip(bits, offsets, strict=True):
            read_into(self._files, self._path, offset, row.data.cast("B"))
        self._did(bits.nbytes)
        return self._as_tensor(bits.reshape(-1))

    def read_bits(self, start: int, stop: int) -> Array:
        """The elements [start, stop) as unsigned integers, a fresh array."""
        bits = np.empty(stop - start, dtype=self._bits)
        self._read(start, bits)
        unsigned: Array = bits.view(f"u{self._bits.itemsize}")
        return unsigned

    @contextlib.contextmanager
    def holding(self, start: int, bits: Array) -> Iterator[None]:
        """Do not read elements again that :meth:`read_bits` has returned."""
        self._held = start, bits.view(self._bits)
        try:
            yield
        finally:
            self._held = None

    def _read(self, start: int, bits: Array) -> None:
        offset = self._entry.start + start * self._bits.itemsize
        read_into(self._files, self._path, offset, bits.data.cast("B"))

    def _as_tensor(self, bits: Array) -> Tensor:
        return torch.from_numpy(bits).view(self.dtype)


def groups_of(tensor: PlannedTensor, recipe: FileRecipe) -> Blocks:
    """The groups of a tensor that is ranked on its own; of its tiles, if the recipe has any."""
    return recipe.group_rule.blocks(tensor.entry.numel, tensor.layout, tensor.num_pruned_per_group)


def bands_of(tensor: PlannedTensor, recipe: FileRecipe) -> Bands | None:
    """The bands of a tensor whose tiles are ranked; None if its elements are."""
    if recipe.tile is None:
        return None
    assert tensor.layout is not None
    return Bands.of(tensor.layout, recipe.tile)


CHUNK = 1 << 19  # elements: the arrays of a step stay below fifty megabytes
# A group of more items, ranked on its own, is counted in one read and cut in another.
MAX_IN_MEMORY = 8 * CHUNK


def bytes_to_count(plan: Plan) -> int:
    """Bytes that are read, over all ranks, to cut the groups that are ranked together.

    More if the keys around a cut do not fit into memory, or the limits of many tensors hold them.
    """
    together = sum(_together(plan, group) for group in plan.groups if group.recipe.is_global)
    return together + bytes_to_add_up(plan)


def bytes_to_add_up(plan: Plan) -> int:
    """Bytes that are read because scores are made of sums along rows and columns."""
    of_ria = [tensor for p, tensor in enumerate(plan.tensors) if plan.recipe_of(p).score == "ria"]
    return 2 * sum(tensor.entry.nbytes for tensor in of_ria)


def bytes_to_count_alone(plan: Plan) -> int:
    """Bytes that are read once more because tensors are too large to be ranked in memory."""
    return sum(
        tensor.entry.nbytes
        for group in plan.groups
        for tensor in plan.tensors[group.first : group.last]
        if group.recipe.scope == "layer"
        and group.recipe.score != "random"
        and tensor.num_groups == 1
        and tensor.entry.numel // group.recipe.group_rule.tile_size > MAX_IN_MEMORY
    )


def _together(plan: Plan, group: PlannedGroup) -> int:
    recipe = group.recipe
    if recipe.score == "random":
        return 0
    entries = [tensor.entry for tensor in plan.tensors[group.first : group.last]]
    if recipe.score == "given" and plan.inputs.given is not None:
        entries = [plan.inputs.given.entries[entry.name] for entry in entries]
    num_bytes = sum(entry.nbytes for entry in entries)
    of_outliers = 3 * num_bytes if recipe.budget == "owl" else 0
    is_wide = recipe.needs_statistics or recipe.tile is not None
    if not is_wide and all(PLAIN_FLOATS[entry.dtype].num_bytes == 2 for entry in entries):
        return num_bytes + of_outliers  # a tally answers everything else
    is_counted = (group.has_limits and recipe.budget is None) or recipe.budget == "lamp"
    return num_bytes * (1 + 2 * (recipe.normalize is not None) + is_counted) + of_outliers
