"""The selected tensors of a plan, ranked: keys are read from the files when they are needed.

The exact selection of live models, over stored numbers. The ranks share the elements of each group
evenly, and exchange what ``ranking`` exchanges. Rows and blocks of N:M lie whole in a slab, and are
ranked while they are rewritten.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import distprune.budgets as budgets
from distprune.base.amount import CEILING, FLOOR
from distprune.base.memory import Array, Scratch, draw_seed
from distprune.base.naming import UnfitScores
from distprune.base.selecting import PLAIN_FLOATS
from distprune.files.checkpoint import TensorEntry
from distprune.files.disk import read_into, slabs
from distprune.files.errors import CheckpointError, NaNError
from distprune.files.planning import Plan, PlannedGroup, bytes_to_count
from distprune.files.statistics_file import StoredStatistics
from distprune.files.team import Team
from distprune.ranking import scores, sums
from distprune.ranking.chunks import Chunk, Part, call_all, spans_of
from distprune.ranking.in_blocks import lowest_of
from distprune.ranking.passes import ALL, Cuts
from distprune.ranking.ranking import ChangedError, Ranking, cut_within
from distprune.shards import factored
from distprune.shards.factored import FactoredScores
from distprune.shards.geometry import IndexMap, MatrixRun, index_map

CPU = torch.device("cpu")
_MOST_COLLECTED = 3 << 20  # keys of a process, of about 12 bytes each
_MAGNITUDES = 1 << 15  # of 16 bits, without the sign
_SPAN = 1 << 19  # elements whose magnitudes are counted at a time: they stay in the cache


# Consecutive elements of a tensor: the index of the first one; their bits, as they are stored; and
# which of them are kept, bool, valid until the next piece.
Piece = tuple[int, Array, Array]
# The elements of a tensor in their order, and which of them are kept.
Pieces = Callable[[TensorEntry], Iterator[Piece]]


class FileValues(scores.ScoreSource):
    """The elements of a stored tensor as a source of scores.

    Args:
        entry: of the tensor.
        count: called with the number of bytes after each read of scores.

    Attributes:
        held: the first element, and the values, of a part that need not be read again.
    """

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
        place = self._entry.start + start * bits.itemsize
        read_into(self._entry.path, [(place, bits.view(np.uint8).data)])
        self._count(bits.nbytes)
        return torch.from_numpy(bits).view(self.dtype)

    def gather(self, runs: scores.Runs) -> Tensor:
        """The elements of some runs."""
        bits: Array = np.empty((len(runs.numbers), runs.length), dtype=self._bits)
        places = self._entry.start + (runs.start + runs.numbers * runs.length) * bits.itemsize
        rows = [row.data for row in bits.view(np.uint8)]
        read_into(self._entry.path, zip(places.tolist(), rows, strict=True))
        self._count(bits.nbytes)
        return torch.from_numpy(bits.reshape(-1)).view(self.dtype)

    def hold(self, run: range) -> Array:
        """Some elements as unsigned integers, a fresh array, which :meth:`load` returns, too."""
        bits: Array = np.empty(len(run), dtype=self._bits)
        place = self._entry.start + run.start * bits.itemsize
        read_into(self._entry.path, [(place, bits.view(np.uint8).data)])
        self.held = run.start, torch.from_numpy(bits).view(self.dtype)
        return bits.view(f"u{bits.itemsize}")


@dataclass
class RankedGroup:
    """A group of a plan, ranked.

    Attributes:
        group: of the plan.
        ranking: of its tensors.
        divisors: per tensor, what its scores are divided by; None: by nothing.
        cuts: where the ranking is cut; None: rows or blocks are ranked.
        common: of the tensors that are ranked together, see Cuts; None: there are none, nothing of
            them is pruned, or limits decide everything.
        bounds: per tensor, "min_sparsity" or "max_sparsity" if this bound decided how many of its
            elements are pruned.
        stored: the same cuts in a ranking of the stored values, where they take less time to apply;
            None: there are none.
    """

    group: PlannedGroup
    ranking: Ranking
    divisors: Sequence[float] | None
    cuts: Cuts | None = None
    common: tuple[int, int, int] | None = None
    bounds: Sequence[str | None] = field(default_factory=list)
    stored: tuple[Ranking, Cuts] | None = None


class RankedTensors:
    """The selected tensors of a plan, the scores that rank them, and which elements are kept.

    Args:
        plan: what to prune.
        team: the ranks.

    Attributes:
        groups: those of the plan, in its order, after :meth:`find_cuts`.
    """

    def __init__(self, plan: Plan, team: Team) -> None:
        self.groups: list[RankedGroup] = []
        self._plan, self._team, self._scratch = plan, team, Scratch()
        # What ``RandomUnstructured`` draws after ``torch.manual_seed(seed)``.
        self._seed = int(draw_seed(torch.Generator().manual_seed(plan.recipe.seed or 0)))
        self._count = functools.partial(team.count, "count")
        self._values = {t.entry.name: FileValues(t.entry, self._count) for t in plan.tensors}
        self._sums: dict[str, list[Tensor]] = {}  # of |w|, by tensor: of inputs, of outputs
        # Tensors are read one after the other: only the latest factors are kept.
        self._terms = functools.lru_cache(1)(self._make_terms)
        self._places = {
            tensor.entry.name: (number, i)
            for number, group in enumerate(plan.groups)
            for i, tensor in enumerate(group.tensors)
        }

    def find_cuts(self) -> None:
        """Find where the ranking of each group is cut. Collective.

        Raises:
            NaNError: a selected tensor has NaN.
            CheckpointError: the source cannot be read, or has changed, or a tensor that is
                normalised has infinite elements. Each on every rank.

        Cost: one read of the scores, and two more if they are normalised; one more if they are so
        many that the keys around the cut do not fit into 36 MiB. No read of random scores.
        Magnitudes of 16 bits are counted in one read; then the tensors whose ties are cut are read.
        """
        team = self._team
        team.begin("count", bytes_to_count(self._plan))
        for group in self._plan.groups:
            recipe, parts = group.recipe, self._parts([tensor.entry for tensor in group.tensors])
            sizes = [part.numel for part in parts]
            with self._errors_of(group):
                sources, keys = self._scores(group, parts), scores.RANDOM_KEYS
                counted: list[sums.Scored] = []
                if group.is_tallied:
                    items = [(*each, each[0].counted) for each in zip(parts, sources, strict=True)]
                    counted = team.run(functools.partial(call_all, _count, items, True))
                divisors: list[float] | None = None
                own = [each.scores for each in counted]
                if recipe.divisor is not None:
                    scored = counted or list(map(sums.Scored, parts, sources))
                    divisors = sums.divisors_of(scored, recipe.divisor, sizes, team)
                    sources = list(map(scores.ScaledScores, sources, divisors))
                    own = [scores.ScaledScores(*each) for each in zip(own, divisors, strict=False)]
                if recipe.score != "random":
                    dtype = functools.reduce(torch.promote_types, [each.dtype for each in sources])
                    keys = scores.key_range(dtype)
                most = _MOST_COLLECTED * team.size
                tallies = [
                    (scores.to_keys(each.load(0, each.size), keys)[0], one.counts)
                    for each, one in zip(own, counted, strict=True)
                    if one.counts is not None
                ]
                ranking = Ranking(
                    parts, (keys, sources), sizes, team, most_collected=most, tallies=tallies
                )
                ranked = RankedGroup(group, ranking, divisors, bounds=[None] * len(parts))
                self.groups.append(ranked)
                if recipe.group_rule.needs_input_dim:
                    continue
                if recipe.budget is not None or not recipe.is_global:
                    counts, ranked.bounds = self._counts_of(group, parts)
                    ranked.cuts = ranking.cut(range(len(parts)), counts)
                elif recipe.has_limits:
                    cut = cut_within(ranking, group.num_to_prune, group.limits)
                    ranked.cuts, ranked.common, ranked.bounds = cut
                else:
                    ranked.cuts = ranking.cut([0] * len(parts), [group.num_to_prune])
                    ranked.common = ranked.cuts.common
                ranking.found, ranking.tallies = [], ()  # which take memory
                if counted and divisors is not None:
                    ranked.stored = self._among_stored(ranking, ranked.cuts, divisors)

    def pieces(self, entry: TensorEntry) -> Iterator[Piece]:
        """The elements of a tensor, in their order.

        Args:
            entry: the tensor.

        Raises:
            NaNError: a tensor whose blocks are ranked has NaN.
            CheckpointError: the source cannot be read, or has changed.
        """
        number, i = self._places[entry.name]
        ranked, values, scratch = self.groups[number], self._values[entry.name], self._scratch
        blocks = ranked.group.tensors[i].blocks
        for run in slabs(entry.numel, values.dtype.itemsize, 1 if blocks is None else blocks.band):
            bits = values.hold(run)
            chunk = Chunk([(i, run.start, run.stop)], True)
            if blocks is None:
                assert ranked.cuts is not None
                ranking, cuts = ranked.stored or (ranked.ranking, ranked.cuts)
                keep = ranking.kept(chunk, cuts, scratch)
            else:
                keys: Array = ranked.ranking.load(chunk, scratch)[0].numpy()
                lowest = lowest_of(blocks, keys, scratch)
                if ranked.ranking.keys.is_float and keys.max() > ranked.ranking.keys.largest_number:
                    raise self._nan_error(ranked.group, [entry.name])
                keep = ~lowest
            yield run.start, bits, keep
        values.held = None

    def keep(self, name: str) -> Array:
        """bool, of the shape of a tensor: which of its elements are kept."""
        number, i = self._places[name]
        entry = self._plan.groups[number].tensors[i].entry
        keep = [np.copy(keep) for _, _, keep in self.pieces(entry)]
        return np.concatenate([np.empty(0, dtype=bool), *keep]).reshape(entry.shape)

    def _among_stored(
        self, ranking: Ranking, cuts: Cuts, divisors: Sequence[float]
    ) -> tuple[Ranking, Cuts] | None:
        """The cuts of divided magnitudes among the stored ones, which have the same order."""
        values = [self._values[part.name] for part in ranking.shards]
        among, threshold = scores.key_range(values[0].dtype), np.empty_like(cuts.threshold)
        bits = torch.arange(among.largest_number + 1, dtype=torch.int16)
        for i, (source, divisor) in enumerate(zip(values, divisors, strict=True)):
            divided = scores.ScaledScores(scores.ScoreSource(bits.view(source.dtype)), divisor)
            keys = scores.to_keys(divided.load(0, len(bits)), ranking.keys)[0].numpy()
            first, stop = keys.searchsorted(cuts.threshold[i] + np.array([0, 1]))
            if stop - first > 1 and 0 < cuts.index[i] < ALL:
                return None  # several magnitudes have the key whose ties are cut
            threshold[i] = stop - 1 if cuts.index[i] >= ALL else first
        found = Ranking(ranking.shards, (among, values), ranking.num_live.tolist(), self._team)
        return found, Cuts(threshold, cuts.index, cuts.num_before)

    @contextlib.contextmanager
    def _errors_of(self, group: PlannedGroup) -> Iterator[None]:
        """Turn errors of a ranking, which are Python's, into those of files."""
        try:
            yield
        except UnfitScores as error:
            if error.what == "nan":
                raise self._nan_error(group, error.names) from None
            raise CheckpointError(
                f"{error} Repair the checkpoint, or exclude the tensor."
            ) from None
        except ChangedError:
            raise CheckpointError(
                "The weights changed while they were read: the counts of two passes differ. "
                "Expected files that nothing writes to; run the command again when they are "
                "complete."
            ) from None

    def _parts(self, entries: Sequence[TensorEntry]) -> list[Part]:
        """What this rank counts of some tensors: one run of all elements, so that reads go on."""
        total, offset = sum(entry.numel for entry in entries), 0
        first, last = (total * (self._team.index + i) // self._team.size for i in (0, 1))
        parts = []
        for entry in entries:
            size = entry.numel
            start = min(max(first - offset, 0), size)
            counted = range(start, max(start, min(last - offset, size)))
            parts.append(Part(entry.name, size, _whole((size,)), counted))
            offset += size
        return parts

    def _scores(self, group: PlannedGroup, parts: Sequence[Part]) -> list[scores.ScoreSource]:
        """What ranks the tensors of a group, before it is divided. Collective."""
        score, names = group.recipe.score, [part.name for part in parts]
        if score == "random":
            ends = np.cumsum([part.numel for part in parts]).tolist()
            return [
                scores.RandomKeys(self._seed, end - part.numel, part.index, part.numel, CPU)
                for part, end in zip(parts, ends, strict=True)
            ]
        if group.recipe.reads_scores:
            assert self._plan.given is not None
            given = {entry.name: entry for entry in self._plan.given.tensors}
            return [FileValues(given[name], self._count) for name in names]
        if score == "ria":
            self._add_up(group)
        if group.recipe.needs_statistics:
            return [self._factored(name, score) for name in names]
        return [self._values[name] for name in names]

    def _counts_of(
        self, group: PlannedGroup, parts: Sequence[Part]
    ) -> tuple[Sequence[int], list[str | None]]:
        """How many elements each tensor of a group loses, and by which bound. Collective."""
        sizes = [part.numel for part in parts]
        counts = [t.num_to_prune for t in group.tensors if t.num_to_prune is not None]
        if group.recipe.budget == "owl":
            scored = [sums.Scored(part, self._factored(part.name, "wanda")) for part in parts]
            blocks = [budgets.block_of(part.name) for part in parts]
            ratios = budgets.outlier_ratios(scored, sizes, blocks, budgets.OWL_MULTIPLE, self._team)
            exact = [budgets.exact_number("outlier ratio", ratio) for ratio in ratios]
            lines = budgets.owl_lines(sizes, exact)
            counts = budgets.divided(lines, *group.limits, group.num_to_prune)
        return counts, [
            FLOOR if n == low > 0 else CEILING if n == high < size else None
            for n, low, high, size in zip(counts, *group.limits, sizes, strict=True)
        ]

    def _nan_error(self, group: PlannedGroup, names: Sequence[str]) -> NaNError:
        where = "the scores of " if group.recipe.reads_scores else ""
        return NaNError(
            f"NaN in {where}{', '.join(names)}; a NaN has no place in a ranking. Repair them, or "
            "exclude the tensor."
        )

    def _add_up(self, group: PlannedGroup) -> None:
        """Add up |w| along rows and columns, where scores are made of that. Collective.

        Cost: two reads of these weights; two all-reduces of 8 bytes per input and output.
        """
        for tensor in group.tensors:
            entry, layout = tensor.entry, self._stored(tensor.entry.name).layout
            (part,) = self._parts([entry])
            scored = sums.Scored(part, self._values[entry.name])
            weight = scored, _whole(layout.shape), layout
            (self._sums[entry.name],) = sums.magnitude_sums([weight], self._team)

    def _factored(self, name: str, score: str) -> scores.ScoreSource:
        """The scores of a tensor that are made of its weights and of statistics."""
        layout = self._stored(name).layout
        matrix, _ = sums.matrices_of(_whole(layout.shape), layout)
        terms = functools.partial(self._terms, name, score, matrix)
        return scores.FactorScores(self._values[name], matrix, terms, are_signed=False)

    def _make_terms(self, name: str, score: str, matrix: MatrixRun) -> list[list[Tensor]]:
        stored = self._stored(name)
        found = factored_of(stored, score, self._sums.get(name, ()))
        dtype = torch.promote_types(self._values[name].dtype, torch.float32)
        return scores.terms_on(matrix, found, stored.layout.shape, CPU, dtype)

    def _stored(self, name: str) -> StoredStatistics:
        assert self._plan.statistics is not None
        return self._plan.statistics.of_tensor[name]


def _count(part: Part, source: scores.ScoreSource, span: range, scratch: Scratch) -> sums.Scored:
    """The distinct magnitudes of 16 bits in a span of a tensor, and how often each occurs."""
    counts: Array = scratch.array("counts", _MAGNITUDES, np.int64)
    counts.fill(0)
    one = torch.ones((), dtype=torch.int64)
    for some in spans_of(span, _SPAN):
        bits = source.load(some.start, some.stop, scratch).view(torch.int16).numpy()
        places = scratch.array("places", bits.size, np.int32)
        np.bitwise_and(bits, _MAGNITUDES - 1, out=places)
        # In place: a bincount for each span would leave memory in pieces.
        torch.from_numpy(counts).index_add_(0, torch.from_numpy(places), one.expand(bits.size))
    present = counts.nonzero()[0]
    values = torch.from_numpy(present.astype(np.int16)).view(source.dtype)
    distinct = Part(part.name, len(present), part.index, range(len(present)))
    return sums.Scored(distinct, scores.ScoreSource(values), counts[present])


def _whole(shape: Sequence[int]) -> IndexMap:
    """From positions in a tensor to themselves."""
    return index_map(shape, [range(size) for size in shape], range(len(shape)))


def factored_of(stored: StoredStatistics, score: str, sums: Sequence[Tensor]) -> FactoredScores:
    """What |w| is multiplied by; ``sums`` of |w|, for "ria": of each input and of each output."""
    first, second = map(torch.from_numpy, (stored.first, stored.second))
    if score == "fisher":
        return factored.fisher(stored.layout, first, second, stored.count, stored.rows)
    if score == "stade":
        return factored.stade(stored.layout, first, second, stored.count)
    if score == "ria":
        return factored.ria(stored.layout, second, stored.count, sums)
    return factored.wanda(stored.layout, second, stored.count)
