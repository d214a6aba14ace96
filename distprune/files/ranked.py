"""The selected tensors of a plan, ranked: keys are read from the files when they are needed.

The exact selection of live models, over stored numbers. The ranks share the elements of each group
evenly, and exchange what ``ranking`` exchanges. Rows and blocks of N:M lie whole in a slab, and are
ranked while they are rewritten.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from distprune.base.amount import CEILING, FLOOR
from distprune.base.exact_sums import scale_of
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.base.hashing import draw_seed
from distprune.base.memory import Array, Runs, Scratch
from distprune.base.naming import UnfitScores
from distprune.budgets import (
    OWL_MULTIPLE,
    block_of,
    divided,
    exact_number,
    outlier_ratios,
    owl_lines,
)
from distprune.files.checkpoint import TensorEntry
from distprune.files.disk import fill, opened, read_into, slabs
from distprune.files.errors import CheckpointError, NaNError, SelectionError
from distprune.files.planning import Plan, PlannedGroup, bytes_to_count
from distprune.files.statistics_file import StoredSums
from distprune.files.team import Team
from distprune.ranking.chunks import Chunk, Part
from distprune.ranking.in_blocks import lowest_of
from distprune.ranking.keys import RANDOM_KEYS, KeyRange, Order, key_range
from distprune.ranking.passes import Common
from distprune.ranking.passes import Cuts as RankedCuts
from distprune.ranking.ranking import Limits, Ranking, cut_within
from distprune.ranking.scores import (
    FactorScores,
    RandomKeys,
    ScaledScores,
    ScoreSource,
    terms_on,
    widened,
)
from distprune.ranking.search import ChangedError
from distprune.ranking.sums import (
    Scored,
    Summed,
    divisors_of,
    magnitude_sums,
    matrices_of,
    per_part,
)
from distprune.ranks.collectives import Communicator
from distprune.shards import factored
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import IndexMap

CPU = torch.device("cpu")
_MOST_SUMS = 1 << 20  # that are added up at a time; each takes some 50 bytes until it is done
_MOST_COLLECTED = 3 << 20  # keys of a process, of about 12 bytes each

# What is counted for the report: by kind and by position of a tensor.
Counts: TypeAlias = defaultdict[str, Counter[int]]


class Piece(NamedTuple):
    """Consecutive elements of a tensor.

    Attributes:
        first: index of the first one.
        bits: as they are stored.
        keep: bool, which of them are kept; valid until the next piece.
    """

    first: int
    bits: Array
    keep: Array


# The elements of a tensor in their order, and which of them are kept; adds to the counts.
Pieces = Callable[[int, Counts], Iterator[Piece]]


@dataclass(frozen=True)
class TensorCut:
    """Where one tensor is cut.

    Attributes:
        threshold: elements with a smaller key go, with a larger one stay ...
        index: ... and with this key, those with a smaller index go.
        bound: "min_sparsity" or "max_sparsity" if this bound decided how many elements are pruned.
    """

    threshold: int
    index: int
    bound: str | None = None


@dataclass(frozen=True)
class Cuts:
    """Where all rankings are cut, the same on every rank.

    Attributes:
        groups: per group; None: its tensors are not ranked together, nothing of it is pruned, or
            limits decide everything.
        tensors: per tensor; None: its rows or blocks are ranked.
        num_nan: by name of a tensor that has NaN and is ranked as a whole.
        divisors: per tensor, what its scores are divided by; None: by nothing.
    """

    groups: list[Common | None]
    tensors: list[TensorCut | None]
    num_nan: dict[str, int]
    divisors: list[float | None]

    def as_json(self) -> dict[str, Any]:
        """Plain values, for :meth:`RankedTensors.find_cuts`."""
        return asdict(self)


class FileValues:
    """The elements of a stored tensor as a source of scores: see ``ranking.scores.ScoreSource``.

    Args:
        entry: of the tensor.
        count: called with the number of bytes after each read of scores.

    Attributes:
        held: the first element, and the values, of a part that need not be read again.
    """

    is_thread_safe = False  # progress is reported
    device = CPU

    def __init__(self, entry: TensorEntry, count: Callable[[int], None]) -> None:
        self.size = entry.numel
        self.dtype: torch.dtype = getattr(torch, PLAIN_FLOATS[entry.dtype].torch_name)
        self.held: tuple[int, Tensor] | None = None
        self._entry, self._count = entry, count
        self._bits = np.dtype(f"i{self.dtype.itemsize}")

    def load(self, start: int, stop: int, scratch: Scratch | None = None) -> Tensor:
        """The elements [start, stop).

        Raises:
            CheckpointError: the file cannot be read, or is shorter than it was.
        """
        if self.held is not None:
            first, values = self.held
            if first <= start and stop <= first + len(values):
                return values[start - first : stop - first]
        bits: Array = (scratch or Scratch()).array("read", stop - start, self._bits)
        self._read(start, bits)
        self._count(bits.nbytes)
        return torch.from_numpy(bits).view(self.dtype)

    def gather(self, runs: Runs) -> Tensor:
        """The elements of some runs."""
        bits = np.empty((len(runs.numbers), runs.length), dtype=self._bits)
        starts = (runs.start + runs.numbers * runs.length).tolist()
        with opened(self._entry.path) as descriptor:
            for row, start in zip(bits, starts, strict=True):
                offset = self._entry.start + start * bits.itemsize
                fill(descriptor, self._entry.path, offset, row.data.cast("B"))
        self._count(bits.nbytes)
        return torch.from_numpy(bits.reshape(-1)).view(self.dtype)

    def hold(self, run: range) -> Array:
        """Some elements as unsigned integers, a fresh array, which :meth:`load` returns, too."""
        bits = np.empty(len(run), dtype=f"u{self._bits.itemsize}")
        self._read(run.start, bits)
        self.held = run.start, torch.from_numpy(bits.view(self._bits)).view(self.dtype)
        return bits

    def _read(self, start: int, bits: Array) -> None:
        entry = self._entry
        read_into(entry.path, entry.start + start * bits.itemsize, bits.data.cast("B"))


class RankedTensors:
    """The selected tensors of a plan, the scores that rank them, and which elements are kept.

    Args:
        plan: what to prune.
        team: the ranks.

    Attributes:
        plan: what to prune.
        cuts: where rankings are cut, after :meth:`find_cuts`.
        scores: per tensor, the scores of its elements, before they are divided.
        key_ranges: per tensor, the keys that it is ranked by: those of its group, if it is not
            ranked alone.
    """

    def __init__(self, plan: Plan, team: Team) -> None:
        self.plan, self._team = plan, team
        # What ``RandomUnstructured`` draws after ``torch.manual_seed(seed)``.
        self._seed = int(draw_seed(torch.Generator().manual_seed(plan.recipe.seed or 0)))
        self._latest: tuple[int, str, list[list[Tensor]]] | None = None
        self._sums: dict[int, list[Tensor]] = {}  # of |w|, by position: of inputs, of outputs
        self._scratch = Scratch()
        self._values = [FileValues(tensor.entry, team.count) for tensor in plan.tensors]
        self.scores: list[ScoreSource] = []
        self.key_ranges: list[KeyRange] = []
        self.cuts: Cuts
        for group in plan.groups:
            scores: list[ScoreSource] = [*self._values[group.first : group.last]]
            if group.recipe.reads_scores:
                given = plan.inputs.given_entries
                names = [tensor.entry.name for tensor in plan.tensors[group.first : group.last]]
                scores = [FileValues(given[name], team.count) for name in names]
            elif group.recipe.needs_statistics:
                positions = range(group.first, group.last)
                scores = [self._factored(position, group.recipe.score) for position in positions]
            self.scores += scores
            dtype = functools.reduce(torch.promote_types, [each.dtype for each in scores])
            if group.recipe.divisor is not None:
                dtype = torch.promote_types(dtype, torch.float32)
            is_random = group.recipe.score == "random"
            keys = RANDOM_KEYS if is_random else key_range(dtype, Order.MAGNITUDE)
            self.key_ranges += [keys] * len(scores)

    def find_cuts(self, known: Any = None) -> Cuts:
        """Find where the ranking of each group is cut. Collective.

        Args:
            known: what ``cuts.as_json`` was on an earlier run, so that only sums are missing.

        Raises:
            NaNError: a selected tensor has NaN, and the recipe does not keep them.
            SelectionError: more is to be pruned than there are numbers, or than limits allow
                without NaN.
            CheckpointError: the source cannot be read, or has changed, or a tensor that is
                normalised has infinite elements. Each on every rank.

        Cost: one read of the scores, and two more if they are normalised; one more if they are so
        many that the keys around the cut do not fit into 36 MiB. No read of random scores.
        """
        plan = self.plan
        if known is not None:
            from pydantic import TypeAdapter

            self.cuts = TypeAdapter(Cuts).validate_python(known)
        else:
            self._team.begin("count", bytes_to_count(plan))
            num_groups, num_tensors = len(plan.groups), len(plan.tensors)
            none = [None] * num_tensors
            self.cuts = Cuts([None] * num_groups, [*none], {}, [*none])
        with self._errors_of_files():
            self._add_up()
            for number, group in enumerate(plan.groups if known is None else ()):
                if not group.in_blocks:
                    self._cut(number, group)
        return self.cuts

    def pieces(self, position: int, counts: Counts) -> Iterator[Piece]:
        """The elements of a tensor, in their order.

        Args:
            position: of the tensor.
            counts: by position, it gets the NaN of tensors whose blocks are ranked ("nan").

        Raises:
            NaNError, SelectionError: of a tensor whose blocks are ranked.
            CheckpointError: the source cannot be read, or has changed.
        """
        tensor, values, scratch = self.plan.tensors[position], self._values[position], self._scratch
        ranking = self._ranking([position], None, Communicator(()))
        cut, blocks = self.cuts.tensors[position], tensor.blocks
        if cut is not None:
            none = np.zeros(1, dtype=np.int64)
            cuts = RankedCuts(np.array([cut.threshold]), np.array([cut.index]), none, none)
        band = 1 if blocks is None else blocks.band
        for run in slabs(tensor.entry.numel, values.dtype.itemsize, band):
            bits = values.hold(run)
            chunk = Chunk([(0, run.start, run.stop)], True)
            if blocks is None:
                keep = ranking.kept(chunk, cuts, scratch)
            else:
                keys: Array = ranking.load(chunk, scratch)[0].numpy()
                lowest = lowest_of(blocks, keys, scratch)
                self._count_nan_of_blocks(position, counts, keys, lowest)
                keep = ~lowest
            yield Piece(run.start, bits, keep)
        values.held = None

    def keep(self, name: str) -> Array:
        """bool, of the shape of a tensor: which of its elements are kept."""
        names = [tensor.entry.name for tensor in self.plan.tensors]
        entry = self.plan.tensors[position := names.index(name)].entry
        keep: Array = np.empty(entry.numel, dtype=np.bool_)
        for piece in self.pieces(position, defaultdict(Counter)):
            keep[piece.first : piece.first + len(piece.keep)] = piece.keep
        return keep.reshape(entry.shape)

    def _cut(self, number: int, group: PlannedGroup) -> None:
        """Cut the ranking of a group. Collective."""
        recipe, team, k = group.recipe, self._team, group.num_to_prune
        positions = range(group.first, group.last)
        tensors = [self.plan.tensors[position] for position in positions]
        sizes = [tensor.entry.numel for tensor in tensors]
        shares = list(team.shares(sizes))
        parts = [self._scored(p, share) for p, share in zip(positions, shares, strict=True)]
        num_nan = self._count_nan(group, parts)
        numbers = [size - nan for size, nan in zip(sizes, num_nan, strict=True)]
        if recipe.divisor is not None:
            divisors = divisors_of(parts, recipe.divisor, numbers, team)
            self.cuts.divisors[group.first : group.last] = divisors
        ranking = self._ranking(positions, shares, team)
        lowest = tuple(tensor.lowest for tensor in tensors)
        highest = tuple(min(t.highest, most) for t, most in zip(tensors, numbers, strict=True))
        bounds: list[str | None] = [None] * len(parts)
        common: Common | None = None
        if not recipe.is_global or recipe.budget is not None:
            counts = tuple(t.num_to_prune for t in tensors if t.num_to_prune is not None)
            if recipe.budget == "owl":
                lines = self._owl_lines(positions, shares, numbers)
                counts = tuple(divided(lines, lowest, highest, k))
            if recipe.budget is not None:
                for i, count in enumerate(counts):
                    if count == highest[i] < sizes[i]:
                        bounds[i] = CEILING
                    if count == lowest[i] > 0:
                        bounds[i] = FLOOR
            found = ranking.cut(range(len(parts)), counts)
        elif group.has_limits:
            found, common, bounds = cut_within(ranking, k, Limits(lowest, highest))
        else:
            found = ranking.cut([0] * len(parts), [k])
            common = found.common()
        each = zip(found.threshold.tolist(), found.index.tolist(), bounds, strict=True)
        self.cuts.tensors[group.first : group.last] = [TensorCut(*cut) for cut in each]
        self.cuts.groups[number] = common if k else None
        names = [part.name for part in parts]
        self.cuts.num_nan.update({n: nan for n, nan in zip(names, num_nan, strict=True) if nan})

    def _owl_lines(
        self, positions: Sequence[int], shares: Sequence[range], numbers: Sequence[int]
    ) -> Any:
        """The shares of some tensors by the outliers among their scores. Collective."""
        scores = [  # Wanda's, whatever is ranked
            self._scored(position, share, self._factored(position, "wanda"))
            for position, share in zip(positions, shares, strict=True)
        ]
        entries = [self.plan.tensors[position].entry for position in positions]
        blocks = [block_of(entry.name) for entry in entries]
        ratios = outlier_ratios(scores, numbers, blocks, OWL_MULTIPLE, self._team)
        exact = [exact_number("outlier ratio", ratio) for ratio in ratios]
        return owl_lines([entry.numel for entry in entries], exact)

    def _count_nan(self, group: PlannedGroup, parts: Sequence[Scored]) -> list[int]:
        """NaN of every tensor, if they are kept. Collective; one read of the scores."""
        if self.plan.recipe.nan != "keep" or group.recipe.score == "random":
            return [0] * len(parts)

        def count_nan(i: int, span: range, scratch: Scratch) -> int:
            scores = parts[i].scores.load(span.start, span.stop, scratch)
            return int(np.count_nonzero(np.isnan(widened(scores, scratch, parts[i].dtype))))

        def count() -> Tensor:
            return torch.tensor(per_part(parts, count_nan), dtype=torch.int64)

        num_nan: list[int] = self._team.reduce(len(parts), count).tolist()
        most = 0
        for tensor, nan in zip(self.plan.tensors[group.first : group.last], num_nan, strict=True):
            least = tensor.lowest if tensor.num_to_prune is None else tensor.num_to_prune
            highest = min(tensor.highest, tensor.entry.numel - nan)
            most += highest
            if highest < least:
                raise self._too_few(tensor.entry.name, least, highest)
        if most < group.num_to_prune:
            raise self._too_few("the selection", group.num_to_prune, most)
        return num_nan

    @staticmethod
    def _too_few(what: str, least: int, most: int) -> SelectionError:
        return SelectionError(
            f"{what}: {least:,} elements are to be pruned, but only {most:,} may be: the others "
            "are NaN, which are kept, or above a limit. Lower the sparsity, or exclude the tensor."
        )

    def _count_nan_of_blocks(
        self, position: int, counts: Counts, keys: Array, lowest: Array
    ) -> None:
        """Refuse or count NaN, which rank last."""
        key_range = self.key_ranges[position]
        is_nan = keys > key_range.largest_number
        num_nan = int(np.count_nonzero(is_nan)) if key_range.is_float else 0
        if not num_nan:
            return
        name = self.plan.tensors[position].entry.name
        if self.plan.recipe.nan == "error":
            raise self._nan_error([name])
        counts["nan"][position] += num_nan
        if (is_nan & lowest).any():
            raise SelectionError(
                f"{name}: more of a row or block is to be pruned than is no NaN, and NaN are kept. "
                "Lower the sparsity, or exclude the tensor."
            )

    def _nan_error(self, names: Sequence[str]) -> NaNError:
        are_given = any(t.recipe.reads_scores for t in self.plan.tensors if t.entry.name in names)
        where = "scores" if are_given else "checkpoint"
        return NaNError(
            f"NaN in {'the scores of ' if are_given else ''}{', '.join(names)}; a NaN has no place "
            f"in a ranking. Repair the {where}, exclude the tensor, or keep NaN as they are "
            "(nan: keep)."
        )

    @contextlib.contextmanager
    def _errors_of_files(self) -> Iterator[None]:
        """Say what selection refuses in terms of a checkpoint."""
        try:
            yield
        except UnfitScores as error:
            if error.what == "nan":
                raise self._nan_error(error.names) from None
            text = f"{error} Repair the checkpoint, or exclude the tensor."
            raise CheckpointError(text) from None
        except ChangedError:
            raise CheckpointError(
                "The weights changed while they were read: the counts of two passes differ. "
                "Expected files that nothing writes to; run the command again when they are "
                "complete."
            ) from None

    def _add_up(self) -> None:
        """Add up |w| along rows and columns, where scores are made of that. Collective.

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
                found = magnitude_sums(self._summed(batch), self._team)
                self._sums |= zip(batch, found, strict=True)
                batch, num_sums = [], 0

    def _summed(self, positions: Sequence[int]) -> list[Summed]:
        """What this rank adds up of some weights."""
        sizes = [self.plan.tensors[position].entry.numel for position in positions]
        weights = []
        for position, share in zip(positions, self._team.shares(sizes), strict=True):
            layout = self._stored(position).layout
            part = self._scored(position, share, self._values[position])
            weights.append(Summed.of(part, _whole(layout.shape), layout))
        return weights

    def _scored(self, position: int, share: range, scores: ScoreSource | None = None) -> Scored:
        """A tensor as a normalisation sees it.

        Args:
            share: the elements that this rank counts.
            scores: other ones than those that it is ranked by.
        """
        keeps_nan = self.plan.recipe.nan == "keep"
        return Scored(self._part(position, share), scores or self.scores[position], keeps_nan)

    def _ranking(
        self, positions: Sequence[int], shares: Sequence[range] | None, ranks: Communicator
    ) -> Ranking:
        """Tensors with keys of one range, by scores that may be divided.

        Args:
            positions: of the tensors.
            shares: the elements of each that this rank counts; None: all.
            ranks: the ranks that rank them.
        """
        parts, sizes = [], []
        sources: list[ScoreSource] = []
        for number, position in enumerate(positions):
            tensor, divisor = self.plan.tensors[position], self.cuts.divisors[position]
            sizes.append(tensor.entry.numel)
            share = range(sizes[-1]) if shares is None else shares[number]
            parts.append(self._part(position, share))
            scores = self.scores[position]
            if tensor.recipe.score == "random":
                scores = RandomKeys(self._seed, tensor.offset, parts[-1].index, sizes[-1], CPU)
            elif divisor is not None:
                dtype = torch.promote_types(scores.dtype, torch.float32)
                scores = ScaledScores(scores, scale_of(divisor, dtype))
            sources.append(scores)
        return Ranking(
            parts,
            (self.key_ranges[positions[0]], sources),
            sizes,
            ranks,
            refuse_nan=self.plan.recipe.nan == "error",
            most_collected=None if shares is None else _MOST_COLLECTED * ranks.size,
        )

    def _part(self, position: int, share: range) -> Part:
        entry = self.plan.tensors[position].entry
        return Part(entry.name, entry.numel, _whole((entry.numel,)), share)

    def _factored(self, position: int, score: str) -> ScoreSource:
        """The scores of a tensor that are made of its weights and of statistics."""
        stored, values = self._stored(position), self._values[position]
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
