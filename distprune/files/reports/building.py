"""A report and its warnings, from a plan, the cuts of its groups, and the records of all files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distprune.base.amount import collapsed
from distprune.files.cuts import Cuts
from distprune.files.errors import OutputError
from distprune.files.planning import Plan
from distprune.files.reading import Source
from distprune.files.reports import (
    GroupReport,
    Record,
    Report,
    RunFacts,
    TensorReport,
    identity_of,
    summed,
)
from distprune.files.text import format_percent
from distprune.ranking.keys import KeyRange

# What a report knows of a group from the ranking alone.
_OF_GROUP = ("threshold", "threshold_bits", "num_ties", "num_ties_pruned")


def make_report(source: Source, cuts: Cuts, records: Sequence[Record], run: RunFacts) -> Report:
    """The report of a run.

    Args:
        source: what reads the scores of the plan.
        cuts: where the groups that are ranked together are cut.
        records: of all weight files, each once.
        run: how the result was made.
    """
    plan, num_pruned = source.plan, summed(records, "pruned")
    of_tensors, of_groups = _found(source, cuts, records, num_pruned)
    tensors = [
        TensorReport(
            name=tensor.entry.name,
            dtype=tensor.entry.dtype,
            shape=tensor.entry.shape,
            file=tensor.entry.file,
            num_elements=tensor.entry.numel,
            num_pruned=num_pruned[position],
            group=tensor.group,
            limits=(tensor.lowest, tensor.highest)
            if plan.groups[tensor.group].has_limits
            else None,
            **facts,
        )
        for position, (tensor, facts) in enumerate(zip(plan.tensors, of_tensors, strict=True))
    ]
    groups = []
    for index, (group, facts) in enumerate(zip(plan.groups, of_groups, strict=True)):
        total = sum(tensor.num_pruned for tensor in tensors[group.first : group.last])
        groups.append(GroupReport(index, group.num_elements, total, **facts))
    only = groups[0] if len(groups) == 1 else None
    sums = [(int(p), crc) for record in records for p, crc in record.get("values", {}).items()]
    return Report(
        digest=plan.digest,
        recipe=plan.recipe.as_stored().as_values(),
        num_elements=plan.num_elements,
        num_pruned=sum(group.num_pruned for group in groups),
        **{name: getattr(only, name, None) for name in _OF_GROUP},
        tensors=tuple(tensors),
        kept=tuple((v.entry.name, v.reason) for v in plan.verdicts if not v.is_pruned),
        source=identity_of(plan.checkpoint),
        copied=tuple(other.name for other in plan.copied),
        skipped=plan.checkpoint.skipped,
        run=run,
        groups=tuple(groups),
        warnings=warnings_about(plan, tensors),
        inputs=plan.inputs.facts() or None,
        checksums=None if plan.inputs.values is None else tuple(sorted(sums)),
    )


# By tensor and by group, facts of a ranking.
_Facts = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def _found(
    source: Source, cuts: Cuts, records: Sequence[Record], num_pruned: Mapping[int, int]
) -> _Facts:
    """What a ranking has found."""
    plan = source.plan
    num_nan, num_zero = summed(records, "nan"), summed(records, "zero")
    of_tensors: list[dict[str, Any]] = []
    of_groups: list[dict[str, Any]] = []
    for position, (tensor, cut) in enumerate(zip(plan.tensors, cuts.tensors, strict=True)):
        if cut is not None:
            num_nan[position] = cuts.num_nan.get(tensor.entry.name, 0)
        key, held_at = None, None
        is_alone = tensor.num_to_prune is not None or tensor.recipe.budget is not None
        if cut is not None and (cut.bound or is_alone):
            key, held_at = cut.threshold if num_pruned[position] else None, cut.bound
        of_tensors.append(
            {
                "num_nan": num_nan[position],
                "threshold": None if key is None else _score(source.key_ranges[position], key),
                "num_zero": num_zero[position],
                "held_at": held_at,
                "divisor": cuts.divisors[position],
            }
        )
    for group, found in zip(plan.groups, cuts.groups, strict=True):
        facts: dict[str, Any] = dict.fromkeys(_OF_GROUP)
        if found is not None:
            facts["threshold"] = _score(source.key_ranges[group.first], found.threshold)
            facts["threshold_bits"] = hex(found.threshold)
            facts["num_ties"] = found.num_ties
            facts["num_ties_pruned"] = found.num_ties_pruned
        of_groups.append(facts)
    return of_tensors, of_groups


def check_counts(report: Report, plan: Plan) -> None:
    """Raise OutputError if the records of a run do not add up to what was planned."""
    for group, planned in zip(report.groups, plan.groups, strict=True):
        if group.num_pruned != planned.num_to_prune:
            raise OutputError(
                f"the records of what was done say that {group.num_pruned} elements were pruned; "
                f"the plan says {planned.num_to_prune}. They were changed during the run, and "
                "nothing is published. Run the same command with --discard, and then again without."
            )


def _score(keys: KeyRange, key: int) -> float | None:
    """The score of a key; None if it has none, or JSON cannot hold it (inf)."""
    score = keys.score_of(key) if keys.is_float else math.inf
    return None if math.isinf(score) else score


# A tensor is nearly empty if more than this fraction of it was pruned.
_NEARLY_ALL = 0.99
# A source is sparse if more than this fraction is zero: trained weights have hardly any zeros.
_SPARSE = 0.01
_NUM_SHOWN = 5


def warnings_about(plan: Plan, tensors: Sequence[TensorReport]) -> tuple[str, ...]:
    """One or two sentences for each thing that may be wrong with a result.

    Args:
        plan: what was done.
        tensors: counts of each tensor of the plan.
    """
    values = plan.inputs.values
    # What the rounds before have pruned is no surprise.
    in_rounds = values is not None and "rounds" in values.facts
    return (*_emptied(plan, tensors), *([] if in_rounds else _sparse_before(tensors)))


def _of_collapsed(plan: Plan, tensors: Sequence[TensorReport]) -> list[TensorReport]:
    """The tensors that have collapsed in groups that are ranked together."""
    found: list[TensorReport] = []
    for group in plan.groups:
        members = tensors[group.first : group.last]
        if group.recipe.is_global and group.recipe.budget is None:
            counts = [(tensor.num_elements, tensor.num_pruned) for tensor in members]
            emptied = [members[position] for position in collapsed(counts)]
            found += [tensor for tensor in emptied if tensor.held_at is None]
    return found


def _emptied(plan: Plan, tensors: Sequence[TensorReport]) -> list[str]:
    """A warning about tensors that lost nearly all: raw weights, or what a ranking has emptied."""
    recipes = [group.recipe for group in plan.groups]
    are_weights = all(recipe.score in ("magnitude", "random") for recipe in recipes)
    if are_weights and all(each.divisor is None and each.budget is None for each in recipes):
        emptied, lost, what = _nearly_empty(plan, tensors), "lose{} more than 99 %", "weights"
    else:
        emptied, lost = _of_collapsed(plan, tensors), "keep{} at most 1 %"
        what = "normalised weights" if are_weights else "scores"
    if not emptied:
        return []
    return [
        f"{_shown(emptied)} {lost.format('s' if len(emptied) == 1 else '')}, because the {what} "
        f"are smaller than those of the other tensors. The model may be useless; "
        "max_sparsity (--max-sparsity) bounds what a single tensor loses, and exclude "
        "leaves it alone."
    ]


def _shown(tensors: Sequence[TensorReport]) -> str:
    """The names of the first of some tensors, by sparsity, with what they lost."""
    in_order = sorted(tensors, key=lambda tensor: (-tensor.sparsity, tensor.name))
    shown = [
        f"{tensor.name} ({format_percent(tensor.num_pruned, tensor.num_elements)} of "
        f"{tensor.num_elements:,} elements)"
        for tensor in in_order[:_NUM_SHOWN]
    ]
    if len(tensors) > _NUM_SHOWN:
        shown.append(f"{len(tensors) - _NUM_SHOWN} more")
    return ", ".join(shown)


def _nearly_empty(plan: Plan, tensors: Sequence[TensorReport]) -> list[TensorReport]:
    """The tensors that lost nearly all, in groups that did not."""
    return [
        tensor
        for tensor in tensors
        if tensor.num_pruned > _NEARLY_ALL * tensor.num_elements
        and plan.groups[tensor.group].num_to_prune
        <= _NEARLY_ALL * plan.groups[tensor.group].num_elements
    ]


def _sparse_before(tensors: Sequence[TensorReport]) -> list[str]:
    """A warning about zeros in the source: they are pruned first, so fewer weights change."""
    num_zero = sum(tensor.num_zero for tensor in tensors)
    num_elements = sum(tensor.num_elements for tensor in tensors)
    if num_zero <= _SPARSE * num_elements:
        return []
    return [
        f"the source is sparse already: {num_zero:,} of the {num_elements:,} selected elements "
        f"({format_percent(num_zero, num_elements)}) are zero in it. The sparsity that was "
        "asked for is the total, and they count towards it."
    ]
