"""Where the rankings of a plan are cut: the exact selection of live models, over stored numbers.

The ranks share the elements of each group evenly, and exchange what ``selection`` exchanges. Scores
of 16 bits are tallied in one read, which answers everything else; others are read once for a
sample and a scan, and twice more if they are normalised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distprune._common.amount import Bounds, bound_met
from distprune._common.collectives import Communicator
from distprune._common.naming import subject_of
from distprune.budgets.base import RankedShards
from distprune.budgets.outliers import OWL_MULTIPLE, block_of, outlier_ratios
from distprune.files.errors import CheckpointError, NaNError, SelectionError
from distprune.files.planning import Plan, PlannedGroup
from distprune.files.reading import CPU, Source
from distprune.files.selecting import check_budget, division_of
from distprune.files.team import Team
from distprune.recipes import BUDGET_FROM_STATISTICS
from distprune.selection.candidates import Candidates, Cut, PartCut
from distprune.selection.keys import KeyRange
from distprune.selection.normalizing import Scored, divisors_of
from distprune.selection.passes import scan
from distprune.selection.radix import ChangedError
from distprune.selection.search import Selection, select_lowest
from distprune.selection.tallies import are_tallied, keys_of_tally, tallied
from distprune.selection.within_bounds import Limits, select_within

# Of the tallies of a process; and keys of a process, of about 12 bytes each.
_TALLY_BYTES, _MOST_COLLECTED = 48 << 20, 3 << 20
# Blocks whose ties are counted apart: so many in all, but none of fewer elements than this.
_NUM_BLOCKS, _SMALLEST_BLOCK = 512, 1 << 14


@dataclass(frozen=True)
class GroupCut:
    """The cut of the tensors of a group that no limit decides on.

    Attributes:
        threshold: the key of the last element that is pruned.
        num_ties: elements with this key ...
        num_ties_pruned: ... and those of them that are pruned.
    """

    threshold: int
    num_ties: int
    num_ties_pruned: int


@dataclass(frozen=True)
class Cuts:
    """Where all rankings are cut, the same on every rank.

    Attributes:
        groups: per group; None: its tensors are not ranked together, nothing of it is pruned, or
            limits decide everything.
        tensors: per tensor; None: it is ranked on its own.
        num_nan: by name of a tensor that has NaN, in groups that are ranked together.
        divisors: per tensor, what its scores are divided by; None: by nothing.
    """

    groups: tuple[GroupCut | None, ...]
    tensors: tuple[PartCut | None, ...]
    num_nan: Mapping[str, int]
    divisors: tuple[float | None, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for :meth:`from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cuts:
        """The cuts whose :meth:`to_json` was written as JSON."""
        tensors = [
            None if cut is None else PartCut(cut["position"], Cut(**cut["cut"]), cut["bound"])
            for cut in values["tensors"]
        ]
        return cls(
            tuple(None if cut is None else GroupCut(**cut) for cut in values["groups"]),
            tuple(tensors),
            values["num_nan"],
            tuple(values["divisors"]),
        )


def find_cuts(team: Team, plan: Plan, source: Source) -> Cuts:
    """Find where the ranking of each group is cut. Collective.

    Args:
        team: the ranks; :meth:`Team.begin` was called.
        plan: what to do.
        source: of the plan; ranks normalised scores from now on, where the plan says so.

    Raises:
        NaNError: a selected tensor has NaN, and the recipe does not keep them; on every rank.
        SelectionError: more is to be pruned than there are numbers, or than limits allow without
            NaN; on every rank.
        CheckpointError: the source cannot be read, or has changed, or a tensor that is normalised
            has infinite elements; on every rank.

    Cost: one read of scores of 16 bits. Of others one, and two more if they are normalised; two if
    they are so many that the keys around the cut do not fit into memory. No read of random scores.
    Memory: tallies of up to 48 MiB, or 36 MiB of keys.
    """
    add_up(team, plan, source)
    groups: list[GroupCut | None] = []
    tensors: list[PartCut | None] = []
    num_nan: dict[str, int] = {}
    divisors: list[float | None] = []
    for number, group in enumerate(plan.groups):
        count = group.last - group.first
        if not group.recipe.is_global:
            groups.append(None)
            tensors += [None] * count
            divisors += [None] * count
            continue
        with _errors_of_files(plan):
            ranked = _rank(team, plan, source, number, divisors)
            cut, own = _cut(team, plan, source, ranked, number)
        groups.append(cut)
        tensors += own
        names = [part.name for part in ranked.parts]
        num_nan |= {name: nan for name, nan in zip(names, ranked.num_nan, strict=True) if nan}
    return Cuts(tuple(groups), tuple(tensors), num_nan, tuple(divisors))


def add_up(team: Team, plan: Plan, source: Source) -> None:
    """:meth:`Source.add_up`, with errors that name the checkpoint. Collective.

    Raises:
        NaNError, CheckpointError: a weight is NaN or infinite; on every rank.
    """
    with _errors_of_files(plan):
        source.add_up(team)


def cut_of_one_group(
    plan: Plan, source: Source, position: int, group: range, num_pruned: int
) -> PartCut:
    """Where items [start, stop) of a tensor are cut, which are ranked on their own. Local.

    Raises:
        NaNError, CheckpointError: as :func:`find_cuts`.

    Cost: one read; two, if the keys around the cut do not fit into memory.
    """
    name = plan.tensors[position].entry.name
    scored = Scored(name, source.raw_scores(position), None, group, CPU)
    alone = Communicator(())
    with _errors_of_files(plan):
        scores = None
        if not source.is_random(position):
            scores = tallied([scored], alone, _TALLY_BYTES, _block(len(group)))
        part = source.part(position, group, None if scores is None else scores[0])
        selection = select_lowest(
            [part],
            [name],
            [len(group)],
            num_pruned,
            source.key_range(position),
            alone,
            refuse_nan=plan.recipe.nan == "error",
            most_collected=_MOST_COLLECTED,
        )
    return PartCut(0, selection.cut)


def nan_error(plan: Plan, positions: Sequence[int]) -> NaNError:
    """The error for selected tensors that have NaN among their weights or their given scores."""
    names = ", ".join(plan.tensors[position].entry.name for position in positions)
    are_given = any(plan.recipe_of(position).score == "given" for position in positions)
    return NaNError(
        f"NaN in {'the scores of ' if are_given else ''}{names}; a NaN has no place in a ranking. "
        f"Repair the {'scores' if are_given else 'checkpoint'}, exclude the tensor, or keep NaN as "
        "they are (nan: keep)."
    )


@dataclass(frozen=True)
class _Ranked:
    """What is ranked together: the tensors of a group.

    Attributes:
        parts: this rank's part of every tensor, before the scores are divided.
        candidates: the same, with the keys that are ranked.
        keys: the range of all keys.
        sizes: items of every tensor.
        num_nan: NaN of every tensor, if they are kept.
    """

    parts: list[Scored]
    candidates: list[Candidates]
    keys: KeyRange
    sizes: list[int]
    num_nan: list[int]


def _rank(
    team: Team, plan: Plan, source: Source, number: int, divisors: list[float | None]
) -> _Ranked:
    """Measure what the scores of a group are divided by, and make the keys. Collective.

    Args:
        divisors: of the tensors of the groups before; those of this group are added.
    """
    group = plan.groups[number]
    positions = range(group.first, group.last)
    sizes = [source.num_items(position) for position in positions]
    keeps_nan, is_random = plan.recipe.nan == "keep", group.recipe.score == "random"
    parts = [
        source.scored(p, share) for p, share in zip(positions, team.shares(sizes), strict=True)
    ]
    scores = None if is_random else tallied(parts, team, _TALLY_BYTES, _block(sum(sizes)))
    if scores is not None:
        parts = [replace(part, scores=own) for part, own in zip(parts, scores, strict=True)]
    num_nan = [0] * len(parts)
    if keeps_nan and not is_random:
        raw = [
            source.part(p, own.counted, own.scores) for p, own in zip(positions, parts, strict=True)
        ]
        num_nan = _count_nan(raw, sizes, source.key_range(group.first), team)
        _check_numbers(plan, group, num_nan)
    divisors += [None] * len(parts)
    if group.recipe.normalize is not None:
        num_numbers = [size - nan for size, nan in zip(sizes, num_nan, strict=True)]
        divisors[group.first :] = divisors_of(parts, group.recipe.normalize, num_numbers, team)
        source.divide(divisors)
    candidates = [
        source.part(p, own.counted, source.divided(p, own.scores))
        for p, own in zip(positions, parts, strict=True)
    ]
    return _Ranked(parts, candidates, source.key_range(group.first), sizes, num_nan)


def _cut(
    team: Team, plan: Plan, source: Source, ranked: _Ranked, number: int
) -> tuple[GroupCut | None, list[PartCut]]:
    """Cut the ranking of a group. Collective."""
    group = plan.groups[number]
    k = group.num_to_prune // group.recipe.group_rule.tile_size
    refuse_nan, most = plan.recipe.nan == "error", _MOST_COLLECTED * team.size
    names = [part.name for part in ranked.parts]
    what = ranked.candidates, names, ranked.sizes, k, ranked.keys, team
    selection: Selection | None
    tensors = plan.tensors[group.first : group.last]
    lowest = tuple(tensor.lowest for tensor in tensors)
    highest = tuple(
        min(tensor.highest, size - nan)
        for tensor, size, nan in zip(tensors, ranked.sizes, ranked.num_nan, strict=True)
    )
    if group.recipe.budget is not None:
        counts = _divided(team, plan, source, ranked, number, Bounds(lowest, highest))
        cuts, selection = select_within(
            *what, Limits(counts, counts), refuse_nan=refuse_nan, most_collected=most
        )
        met = map(bound_met, counts, lowest, highest, ranked.sizes, [0] * len(counts))
        cuts = [replace(cut, bound=bound) for cut, bound in zip(cuts, met, strict=True)]
    elif group.has_limits:
        limits = Limits(lowest, highest)
        cuts, selection = select_within(*what, limits, refuse_nan=refuse_nan, most_collected=most)
    else:
        selection = select_lowest(*what, refuse_nan=refuse_nan, most_collected=most)
        cuts = [PartCut(position, selection.cut) for position in range(len(names))]
    if selection is None or not k:
        return None, cuts
    return GroupCut(selection.cut.threshold, selection.num_ties, selection.num_ties_pruned), cuts


def _divided(
    team: Team, plan: Plan, source: Source, ranked: _Ranked, number: int, limits: Bounds
) -> tuple[int, ...]:
    """How many elements of each tensor the budget of a group prunes. Collective."""
    group = plan.groups[number]
    tensors = plan.tensors[group.first : group.last]
    of_shapes = tuple(tensor.budgeted for tensor in tensors if tensor.budgeted is not None)
    if len(of_shapes) == len(tensors):
        return of_shapes
    entries = [tensor.entry for tensor in tensors]
    ratios = None
    if group.recipe.budget == BUDGET_FROM_STATISTICS:
        names = [entry.name for entry in entries]
        parts = [
            source.outlier_scores(position, part.counted)
            for position, part in enumerate(ranked.parts, group.first)
        ]
        num_numbers = [size - nan for size, nan in zip(ranked.sizes, ranked.num_nan, strict=True)]
        blocks = [block_of(name) for name in names]
        found = outlier_ratios(parts, num_numbers, blocks, OWL_MULTIPLE, team)
        ratios = dict(zip(names, found, strict=True))
    division = division_of(group.recipe, entries, ratios)
    what = RankedShards(ranked.candidates, ranked.sizes, ranked.keys, team)
    return division.counts(group.num_to_prune, limits, what).counts


def _block(num_items: int) -> int:
    return max(-(-num_items // _NUM_BLOCKS), _SMALLEST_BLOCK)


def _count_nan(
    parts: Sequence[Candidates], sizes: Sequence[int], keys: KeyRange, team: Team
) -> list[int]:
    """NaN of every tensor. Collective; one read of scores that have no tallies."""

    def count() -> Tensor:
        if are_tallied(parts):
            numbers = [
                int(counts[own <= keys.largest_number].sum())
                for own, counts in map(keys_of_tally, parts)
            ]
        else:
            numbers = [row[0] for row in scan(parts, [keys.largest_number], None).counts]
        return torch.tensor(numbers, dtype=torch.int64)

    return (torch.tensor(sizes) - team.reduce(len(parts), count)).tolist()


def _check_numbers(plan: Plan, group: PlannedGroup, num_nan: Sequence[int]) -> None:
    """Raise SelectionError if more is to be pruned of a group than there are numbers."""
    if not any(num_nan):
        return
    num_numbers = group.num_elements - sum(num_nan)
    if group.num_to_prune > num_numbers:
        raise SelectionError(
            f"{group.num_to_prune} elements are to be pruned, but only {num_numbers} are no "
            "NaN, and NaN are kept. Lower the sparsity."
        )
    tensors = plan.tensors[group.first : group.last]
    highest = 0
    for tensor, count in zip(tensors, num_nan, strict=True):
        most = min(tensor.highest, tensor.entry.numel - count)
        lowest, rule = tensor.lowest, f"min_sparsity {group.recipe.min_sparsity}"
        if tensor.budgeted is not None:
            lowest, rule = tensor.budgeted, f"budget {group.recipe.budget}"
        if most < lowest:
            raise SelectionError(
                f"{tensor.entry.name}: {rule} prunes at least {lowest:,} elements, but only "
                f"{most:,} are no NaN, and NaN are kept. Lower {rule.split()[0]}, or exclude the "
                "tensor."
            )
        highest += most
    check_budget(group.num_to_prune, 0, highest, group.recipe)


@contextlib.contextmanager
def _errors_of_files(plan: Plan) -> Iterator[None]:
    """Say what selection refuses in terms of a checkpoint."""
    position_of = {tensor.entry.name: p for p, tensor in enumerate(plan.tensors)}
    try:
        yield
    except ValueError as error:
        what, names = subject_of(error)
        positions = [position_of[name] for name in names]
        if what == "nan":
            raise nan_error(plan, positions) from None
        if what == "divisor":
            raise CheckpointError(str(error)) from None
        if what != "infinite":
            raise
        recipes = [plan.recipe_of(position) for position in positions]
        if not any(recipe.normalize for recipe in recipes):
            raise CheckpointError(
                f"elements of {', '.join(names)} are not finite; the score 'ria' and the budgets "
                "'lamp' and 'owl' need sums of all of them. Repair the checkpoint, or exclude the "
                "tensor."
            ) from None
        are_weights = all(recipe.ranks_magnitudes for recipe in recipes)
        raise CheckpointError(
            f"infinite {'elements in' if are_weights else 'scores of'} {', '.join(names)}; a "
            "tensor with them has no rms, l2 norm or mean. Repair the checkpoint, exclude the "
            f"tensor, or rank raw {'magnitudes' if are_weights else 'scores'} (normalize: none)."
        ) from None
    except ChangedError:
        raise CheckpointError(
            "The weights changed while they were read: the counts of two passes differ. Expected "
            "files that nothing writes to; run the command again when they are complete."
        ) from None
