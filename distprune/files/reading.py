"""The selected tensors of a plan as they are ranked: keys are read on demand."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from distprune.base.exact_sums import scale_of
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.base.hashing import draw_seed
from distprune.base.memory import Array, Runs, Scratch
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.checkpoints.statistics_file import StoredSums
from distprune.files.disk.access import fill, opened, read_into
from distprune.files.planning import Plan
from distprune.files.team import Team
from distprune.ranking.chunks import Part
from distprune.ranking.keys import RANDOM_KEYS, KeyRange, Order, key_range
from distprune.ranking.ranking import Ranking
from distprune.ranking.scores import (
    FactorScores,
    RandomKeys,
    ScaledScores,
    ScoreSource,
    terms_on,
)
from distprune.ranking.sums import Scored, Summed, magnitude_sums, matrices_of
from distprune.ranks.collectives import Communicator
from distprune.recipes import GroupRecipe
from distprune.shards import factored
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import IndexMap

CPU = torch.device("cpu")
_MOST_SUMS = 1 << 20  # that are added up at a time; each takes some 50 bytes until it is done


class FileValues:
    """The elements of a stored tensor as a source of scores: see ``ranking.scores.ScoreSource``.

    Args:
        entry: of the tensor.
        did: called with the number of bytes after each read of scores.
    """

    # Progress is reported.
    is_thread_safe = False
    device = torch.device("cpu")

    def __init__(self, entry: TensorEntry, did: Callable[[int], None]) -> None:
        self.size = entry.numel
        self._path = entry.path
        self._start = entry.start
        self._did = did
        self.dtype: torch.dtype = getattr(torch, PLAIN_FLOATS[entry.dtype].torch_name)
        self._bits = np.dtype(f"i{self.dtype.itemsize}")
        self._held: tuple[int, Tensor] | None = None

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        """The elements [start, stop).

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        if self._held is not None:
            first, held = self._held
            if first <= start and stop <= first + len(held):
                return held[start - first : stop - first]
        bits: Array = (scratch or Scratch()).array("read", stop - start, self._bits)
        offset = self._start + start * bits.itemsize
        read_into(self._path, offset, bits.data.cast("B"))
        self._did(bits.nbytes)
        return torch.from_numpy(bits).view(self.dtype)

    def gather(self, runs: Runs) -> Tensor:
        """The elements of some runs."""
        bits = np.empty((len(runs.numbers), runs.length), dtype=self._bits)
        starts = (runs.start + runs.numbers * runs.length).tolist()
        with opened(self._path) as descriptor:
            for row, start in zip(bits, starts, strict=True):
                offset = self._start + start * bits.itemsize
                fill(descriptor, self._path, offset, row.data.cast("B"))
        self._did(bits.nbytes)
        return torch.from_numpy(bits.reshape(-1)).view(self.dtype)

    @contextlib.contextmanager
    def holding(self, start: int, stop: int) -> Iterator[Array]:
        """The elements [start, stop) as unsigned integers, a fresh array.

        :meth:`load` does not read them again inside of this context.
        """
        bits = np.empty(stop - start, dtype=f"u{self._bits.itemsize}")
        offset = self._start + start * bits.itemsize
        read_into(self._path, offset, bits.data.cast("B"))
        self._held = start, torch.from_numpy(bits.view(self._bits)).view(self.dtype)
        try:
            yield bits
        finally:
            self._held = None


class Source:
    """The selected tensors of a plan, and the scores and keys that they are ranked by.

    Args:
        plan: what to prune.
        did: called with the number of bytes after each read of scores.

    Attributes:
        plan: what to prune.
        values: per tensor, its elements.
        scores: per tensor, the scores of its elements, before they are divided.
        key_ranges: per tensor, the keys that it is ranked by: those of its group, if it is not
            ranked alone.
    """

    def __init__(self, plan: Plan, did: Callable[[int], None] = lambda num_bytes: None) -> None:
        self.plan = plan
        # What ``RandomUnstructured`` draws after ``torch.manual_seed(seed)``.
        generator = torch.Generator().manual_seed(plan.recipe.seed or 0)
        self._seed = int(draw_seed(generator))
        self._latest: tuple[int, str, list[list[Tensor]]] | None = None
        self._sums: dict[int, list[Tensor]] = {}  # of |w|, by position: of inputs, of outputs
        self.values = [FileValues(tensor.entry, did) for tensor in plan.tensors]
        self.scores: list[ScoreSource] = []
        self.key_ranges: list[KeyRange] = []
        for group in plan.groups:
            positions = range(group.first, group.last)
            scores: list[ScoreSource] = [*self.values[group.first : group.last]]
            if group.recipe.reads_scores:
                assert plan.inputs.given is not None
                entries = plan.inputs.given.entries
                names = [plan.tensors[each].entry.name for each in positions]
                scores = [FileValues(entries[name], did) for name in names]
            elif group.recipe.needs_statistics:
                scores = [self._factored(position, group.recipe.score) for position in positions]
            self.scores += scores
            self.key_ranges += _key_ranges(group.recipe, [each.dtype for each in scores])

    def add_up(self, team: Team) -> None:
        """Add up |w| along rows and columns, where scores are made of that. Collective.

        Raises:
            ValueError: a weight is NaN, without ``nan: keep``, or infinite; on every rank.

        Cost: two reads of these weights; two all-reduces of 8 bytes per input and output.
        """
        positions = [p for p, each in enumerate(self.plan.tensors) if each.recipe.score == "ria"]
        batch: list[int] = []
        num_sums = 0
        for position in positions:
            batch.append(position)
            layout = self._stored(position).layout
            num_sums += layout.num_inputs + layout.num_outputs
            if num_sums >= _MOST_SUMS or position == positions[-1]:
                found = magnitude_sums(self._summed(batch, team), team)
                self._sums |= zip(batch, found, strict=True)
                batch, num_sums = [], 0

    def _summed(self, positions: Sequence[int], team: Team) -> list[Summed]:
        """What this rank adds up of some weights."""
        sizes = [self.plan.tensors[position].entry.numel for position in positions]
        return [
            Summed.of(
                self.scored(position, share, self.values[position]),
                _whole(layout.shape),
                layout,
            )
            for position, share in zip(positions, team.shares(sizes), strict=True)
            for layout in (self._stored(position).layout,)
        ]

    def scored(self, position: int, share: range, scores: ScoreSource | None = None) -> Scored:
        """A tensor as a normalisation sees it.

        Args:
            share: the elements that this rank counts.
            scores: other ones than those that it is ranked by.
        """
        keeps_nan = self.plan.recipe.nan == "keep"
        return Scored(self._part(position, share), scores or self.scores[position], keeps_nan)

    def outlier_scores(self, position: int, share: range) -> Scored:
        """The same of the scores whose outliers OWL counts: Wanda's, whatever is ranked."""
        return self.scored(position, share, self._factored(position, "wanda"))

    def ranking(
        self,
        positions: Sequence[int],
        divisors: Sequence[float | None],
        shares: Sequence[range] | None,
        ranks: Communicator,
        most_collected: int | None = None,
    ) -> Ranking:
        """Tensors with keys of one range, by scores that may be divided.

        Args:
            positions: of the tensors.
            divisors: what the scores of each are divided by; None: nothing.
            shares: the elements of each that this rank counts; None: all.
            ranks: the ranks that rank them.
            most_collected: as for ``Ranking``.
        """
        keys, parts, sizes = self.key_ranges[positions[0]], [], []
        sources: list[ScoreSource] = []
        for number, position in enumerate(positions):
            tensor, divisor = self.plan.tensors[position], divisors[number]
            sizes.append(tensor.entry.numel)
            share = range(sizes[-1]) if shares is None else shares[number]
            parts.append(self._part(position, share))
            if tensor.recipe.score == "random":
                index = parts[-1].index
                sources.append(RandomKeys(self._seed, tensor.offset, index, sizes[-1], CPU))
                continue
            scores = self.scores[position]
            if divisor is not None:
                dtype = torch.promote_types(scores.dtype, torch.float32)
                scores = ScaledScores(scores, scale_of(divisor, dtype))
            sources.append(scores)
        refuses = self.plan.recipe.nan == "error"
        return Ranking(
            parts, (keys, sources), sizes, ranks,
            refuse_nan=refuses, most_collected=most_collected,
        )  # fmt: skip

    def _part(self, position: int, share: range) -> Part:
        entry = self.plan.tensors[position].entry
        return Part(entry.name, entry.numel, _whole((entry.numel,)), share)

    def _factored(self, position: int, score: str) -> ScoreSource:
        """The scores of a tensor that are made of its weights and of statistics."""
        stored, values = self._stored(position), self.values[position]
        matrix, _ = matrices_of(_whole(stored.layout.shape), stored.layout)

        def make_terms() -> list[list[Tensor]]:
            # Tensors are read one after the other: only the latest factors are kept.
            if self._latest is None or self._latest[:2] != (position, score):
                found = _factored_of(stored, score, self._sums.get(position, ()))
                dtype = torch.promote_types(values.dtype, torch.float32)
                terms = terms_on(matrix, found, stored.layout.shape, CPU, dtype)
                self._latest = position, score, terms
            return self._latest[2]

        return FactorScores(values, matrix, make_terms, are_signed=False)

    def _stored(self, position: int) -> StoredSums:
        entry, statistics = self.plan.tensors[position].entry, self.plan.inputs.statistics
        assert statistics is not None
        return statistics.of_tensor[entry.name]


def _whole(shape: Sequence[int]) -> IndexMap:
    """From positions in a tensor to themselves."""
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return IndexMap(tuple(map(range, shape)), strides, 0, dims=tuple(range(len(shape))))


def _key_ranges(recipe: GroupRecipe, dtypes: list[torch.dtype]) -> list[KeyRange]:
    """The keys of scores of these dtypes, which are the tensors of a group."""
    if recipe.score == "random":
        return [RANDOM_KEYS] * len(dtypes)
    common = functools.reduce(torch.promote_types, dtypes)
    if recipe.divisor is not None:
        common = torch.promote_types(common, torch.float32)
    return [key_range(common, Order.MAGNITUDE)] * len(dtypes)


def _factored_of(stored: StoredSums, score: str, sums: Sequence[Tensor]) -> FactoredScores:
    """What |w| is multiplied by; ``sums`` of |w|, for "ria": of each input and of each output."""
    first, second = map(torch.from_numpy, stored.arrays)
    if score == "fisher":
        return factored.fisher(stored.layout, first, second, stored.count)
    if score == "stade":
        return factored.stade(stored.layout, first, second, stored.count)
    if score == "ria":
        return factored.ria(stored.layout, second, stored.count, sums)
    return factored.wanda(stored.layout, second, stored.count)
