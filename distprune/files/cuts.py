"""Where the rankings of a plan are cut: the exact selection of live models, over stored numbers.

The ranks share the elements of each group evenly, and exchange what ``ranking`` exchanges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distprune.base.amount import bound_met
from distprune.base.memory import Scratch
from distprune.base.naming import UnfitScores
from distprune.budgets import (
    OWL_MULTIPLE,
    block_of,
    divided,
    exact_number,
    outlier_ratios,
    owl_lines,
)
from distprune.files.errors import CheckpointError, NaNError, SelectionError
from distprune.files.planning import Plan, PlannedGroup, PlannedTensor, bytes_to_count
from distprune.files.reading import Source
from distprune.files.selecting import check_budget
from distprune.files.team import Team
from distprune.ranking.descent import ChangedError
from distprune.ranking.ranking import Common
from distprune.ranking.ranking import Cuts as RankedCuts
from distprune.ranking.scores import widened
from distprune.ranking.sums import Scored, divisors_of, per_part
from distprune.ranking.within_bounds import Limits, cut_within
from distprune.ranks.collectives import Communicator

# Keys of a process, of about 12 bytes each.
_MOST_COLLECTED = 3 << 20


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

    def alone(self) -> RankedCuts:
        """The cut for a ranking of this tensor alone."""
        none = np.zeros(1, dtype=np.int64)
        return RankedCuts(np.array([self.threshold]), np.array([self.index]), none, none)


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

    groups: tuple[Common | None, ...]
    tensors: tuple[TensorCut | None, ...]
    num_nan: Mapping[str, int]
    divisors: tuple[float | None, ...]


def find_cuts(team: Team, source: Source, known: Any = None) -> Cuts:
    """Find where the ranking of each group is cut. Collective.

    Args:
        team: the ranks.
        source: of what to do.
        known: plain values of cuts that were found earlier, so that only sums are missing; or None.

    Raises:
        NaNError: a selected tensor has NaN, and the recipe does not keep them; on every rank.
        SelectionError: more is to be pruned than there are numbers, or than limits allow without
            NaN; on every rank.
        CheckpointError: the source cannot be read, or has changed, or a tensor that is normalised
            has infinite elements; on every rank.

    Cost: one read of the scores, and two more if they are normalised; one more if they are so many
    that the keys around the cut do not fit into 36 MiB. No read of random scores.
    """
    plan = source.plan
    if known is None:
        team.begin("count", bytes_to_count(plan))
    with _errors_of_files(plan):
        source.add_up(team)
    if known is not None:
        from pydantic import TypeAdapter

        earlier: Cuts = TypeAdapter(Cuts).validate_python(known)
        return earlier
    cuts: list[Common | None] = [None] * len(plan.groups)
    of_tensors: list[TensorCut | None] = [None] * len(plan.tensors)
    divisors: list[float | None] = [None] * len(plan.tensors)
    num_nan: dict[str, int] = {}
    for number, group in enumerate(plan.groups):
        if group.in_blocks:
            continue
        members = slice(group.first, group.last)
        tensors = plan.tensors[members]
        with _errors_of_files(plan):
            sizes = [tensor.entry.numel for tensor in tensors]
            shares = enumerate(team.shares(sizes), group.first)
            parts = [source.scored(position, share) for position, share in shares]
            counts = _count_nan(team, source, group, parts)
            numbers = [size - nan for size, nan in zip(sizes, counts, strict=True)]
            if group.recipe.divisor is not None:
                divisors[members] = divisors_of(parts, group.recipe.divisor, numbers, team)
            ranked = source.ranking(
                range(group.first, group.last),
                divisors[members],
                [part.shard.counted for part in parts],
                team,
                _MOST_COLLECTED * team.size,
            )
            k = group.num_to_prune
            common: Common | None
            bounds: list[str | None] = [None] * len(parts)
            if group.recipe.is_global and group.recipe.budget is None and not group.has_limits:
                found = ranked.cut([0] * len(parts), [k])
                common = found.common()
            elif group.recipe.is_global and group.recipe.budget is None:
                found, common, bounds = cut_within(ranked, k, _limits(tensors, numbers))
            else:
                exact, bounds = _counts(source, group, parts, numbers, team)
                found, common = ranked.cut(range(len(parts)), exact), None
            each = zip(found.threshold.tolist(), found.index.tolist(), bounds, strict=True)
            of_tensors[members] = [TensorCut(*cut) for cut in each]
        if common is not None and k:
            cuts[number] = common
        num_nan |= {part.name: nan for part, nan in zip(parts, counts, strict=True) if nan}
    return Cuts(tuple(cuts), tuple(of_tensors), num_nan, tuple(divisors))


def nan_error(plan: Plan, positions: Sequence[int]) -> NaNError:
    """The error for selected tensors that have NaN among their weights or their given scores."""
    names = ", ".join(plan.tensors[position].entry.name for position in positions)
    are_given = any(plan.tensors[position].recipe.reads_scores for position in positions)
    return NaNError(
        f"NaN in {'the scores of ' if are_given else ''}{names}; a NaN has no place in a ranking. "
        f"Repair the {'scores' if are_given else 'checkpoint'}, exclude the tensor, or keep NaN as "
        "they are (nan: keep)."
    )


def _limits(tensors: Sequence[PlannedTensor], num_numbers: Sequence[int]) -> Limits:
    """How many elements each tensor loses at least, and at most, of those that are no NaN."""
    return Limits(
        tuple(tensor.lowest for tensor in tensors),
        tuple(min(t.highest, most) for t, most in zip(tensors, num_numbers, strict=True)),
    )


def _counts(
    source: Source,
    group: PlannedGroup,
    parts: Sequence[Scored],
    num_numbers: Sequence[int],
    communicator: Communicator,
) -> tuple[Sequence[int], list[str | None]]:
    """How many elements each tensor of a group loses, if not one ranking decides. Collective.

    Args:
        parts: the scores of the group.
        num_numbers: elements of each tensor that are no NaN.

    Returns:
        The counts, and which bound decided each of them.
    """
    tensors = source.plan.tensors[group.first : group.last]
    lowest, highest = _limits(tensors, num_numbers)
    counts = tuple(tensor.num_to_prune for tensor in tensors if tensor.num_to_prune is not None)
    if group.recipe.budget is None:  # scope "layer"
        return counts, [None] * len(counts)
    if group.recipe.budget == "owl":
        entries = [tensor.entry for tensor in tensors]
        scores = [
            source.outlier_scores(position, part.shard.counted)
            for position, part in enumerate(parts, group.first)
        ]
        names = [entry.name for entry in entries]
        blocks = list(map(block_of, names))
        ratios = outlier_ratios(scores, num_numbers, blocks, OWL_MULTIPLE, communicator)
        exact = [exact_number("outlier ratio", ratio) for ratio in ratios]
        lines = owl_lines([entry.numel for entry in entries], exact)
        counts = tuple(divided(lines, lowest, highest, group.num_to_prune))
    sizes = [tensor.entry.numel for tensor in tensors]
    bounds = list(map(bound_met, counts, lowest, highest, sizes, [0] * len(counts)))
    return counts, bounds


def _count_nan(
    team: Team, source: Source, group: PlannedGroup, parts: Sequence[Scored]
) -> list[int]:
    """NaN of every tensor, if they are kept. Collective; one read of the scores."""
    plan = source.plan
    if plan.recipe.nan != "keep" or group.recipe.score == "random":
        return [0] * len(parts)

    def count_nan(i: int, span: range, scratch: Scratch) -> int:
        scores = parts[i].scores.load(span.start, span.stop, scratch)
        return int(np.count_nonzero(np.isnan(widened(scores, scratch, parts[i].dtype))))

    def count() -> Tensor:
        return torch.tensor(per_part(parts, count_nan), dtype=torch.int64)

    num_nan = team.reduce(len(parts), count).tolist()
    _check_numbers(plan, group, num_nan)
    return num_nan


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
        if tensor.num_to_prune is not None:
            lowest = tensor.num_to_prune
            rule = "sparsity" if group.recipe.budget is None else f"budget {group.recipe.budget}"
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
    except UnfitScores as error:
        what, names = error.what, error.names
        positions = [position_of[name] for name in names]
        if what == "nan":
            raise nan_error(plan, positions) from None
        if what == "divisor":
            raise CheckpointError(str(error)) from None
        recipes = [plan.tensors[position].recipe for position in positions]
        if not any(recipe.divisor for recipe in recipes):
            raise CheckpointError(
                f"elements of {', '.join(names)} are not finite; the score 'ria' and the budget "
                "'owl' need sums of all of them. Repair the checkpoint, or exclude the tensor."
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
