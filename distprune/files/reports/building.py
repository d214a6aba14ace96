"""A report and its warnings, from a plan, the cuts of its groups, and the records of all units.

``verify`` compares the warnings of a report: a new wording would fail existing results. So those
about raw magnitudes stay as they were before there was a normalisation; ``advice_about`` is for the
terminal alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from distprune._common.amount import collapsed
from distprune.files.cuts import Cuts
from distprune.files.errors import OutputError
from distprune.files.planning import Plan
from distprune.files.reading import Source
from distprune.files.reports.report import (
    GroupReport,
    Record,
    Report,
    RunFacts,
    TensorReport,
    identity_of,
    summed,
)
from distprune.files.text import format_percent
from distprune.selection.keys import KeyRange


def make_report(
    plan: Plan,
    source: Source,
    cuts: Cuts,
    records: Sequence[Record],
    run: RunFacts,
) -> Report:
    """The report of a run.

    Args:
        plan: what was done.
        source: of the plan.
        cuts: of the groups that are ranked together.
        records: of all units, each once.
        run: how the result was made.

    Raises:
        OutputError: the records do not add up to what was planned.
    """
    report = derive_report(plan, source, cuts, records, run)
    for group, planned in zip(report.groups, plan.groups, strict=True):
        if group.num_pruned != planned.num_to_prune:
            raise OutputError(
                f"the records of what was done say that {group.num_pruned} elements were pruned; "
                f"the plan says {planned.num_to_prune}. They were changed during the run, and "
                "nothing is published. Run the same command with --discard, and then again without."
            )
    return report


def derive_report(
    plan: Plan,
    source: Source,
    cuts: Cuts,
    records: Sequence[Record],
    run: RunFacts,
) -> Report:
    """:func:`make_report` for counts that may differ from those of the plan."""
    tensors = _tensor_reports(plan, source, cuts, records)
    groups = [_group_report(plan, source, cuts, i, tensors) for i in range(len(plan.groups))]
    only = groups[0] if len(groups) == 1 else None
    return Report(
        digest=plan.digest,
        recipe=plan.recipe.as_stored().as_fields(),
        num_elements=plan.num_elements,
        num_pruned=sum(group.num_pruned for group in groups),
        threshold=only.threshold if only else None,
        threshold_bits=only.threshold_bits if only else None,
        num_ties=only.num_ties if only else None,
        num_ties_pruned=only.num_ties_pruned if only else None,
        tensors=tuple(tensors),
        kept=tuple((v.entry.name, v.reason) for v in plan.verdicts if not v.is_pruned),
        source=identity_of(plan.checkpoint),
        mtimes_ns=mtimes_of(plan),
        copied=tuple(other.name for other in plan.copied),
        skipped=plan.checkpoint.skipped,
        run=run,
        groups=tuple(groups),
        warnings=warnings_about(plan, tensors),
        inputs=plan.inputs.facts() or None,
    )


def mtimes_of(plan: Plan) -> dict[str, int]:
    """When each file of a source was last changed, by name, in nanoseconds."""
    return {file.name: file.mtime_ns for file in plan.checkpoint.all_files}


def _tensor_reports(
    plan: Plan, source: Source, cuts: Cuts, records: Sequence[Record]
) -> list[TensorReport]:
    num_pruned, num_nan, num_zero = (summed(records, what) for what in ("pruned", "nan", "zero"))
    thresholds = _thresholds(plan, source, cuts, records, num_pruned)
    tensors = []
    for position, tensor in enumerate(plan.tensors):
        entry, group = tensor.entry, plan.groups[tensor.group]
        if group.recipe.is_global:
            num_nan[position] = cuts.num_nan.get(entry.name, 0)
        threshold, held_at = thresholds.get(position, (None, None))
        tensors.append(
            TensorReport(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                file=entry.file,
                num_elements=entry.numel,
                num_pruned=num_pruned[position],
                num_nan=num_nan[position],
                threshold=threshold,
                num_zero=num_zero[position],
                group=tensor.group,
                limits=(tensor.lowest, tensor.highest) if group.has_limits else None,
                held_at=held_at,
                divisor=cuts.divisors[position],
            )
        )
    return tensors


def _group_report(
    plan: Plan,
    source: Source,
    cuts: Cuts,
    index: int,
    tensors: Sequence[TensorReport],
) -> GroupReport:
    group = plan.groups[index]
    cut = cuts.groups[index]
    return GroupReport(
        index=index,
        num_elements=group.num_elements,
        num_pruned=sum(tensor.num_pruned for tensor in tensors[group.first : group.last]),
        threshold=None if cut is None else _score(source.key_range(group.first), cut.threshold),
        threshold_bits=None if cut is None else hex(cut.threshold),
        num_ties=None if cut is None else cut.num_ties,
        num_ties_pruned=None if cut is None else cut.num_ties_pruned,
    )


def _thresholds(
    plan: Plan,
    source: Source,
    cuts: Cuts,
    records: Sequence[Record],
    num_pruned: Mapping[int, int],
) -> dict[int, tuple[float | None, str | None]]:
    """Of tensors with a threshold of their own, by position: it, and the limit that set it."""
    thresholds: dict[int, tuple[float | None, str | None]] = {}
    for record in records:
        for text, key in record.get("threshold", {}).items():
            position = int(text)
            thresholds[position] = _score(source.key_range(position), key), None
    for position, cut in enumerate(cuts.tensors):
        if cut is not None and (cut.bound or plan.recipe_of(position).budget):
            is_cut = num_pruned[position] > 0
            score = _score(source.key_range(position), cut.cut.threshold) if is_cut else None
            thresholds[position] = score, cut.bound
    return thresholds


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
        plan: of the result.
        tensors: counts of each tensor of the plan.
    """
    is_raw = all(
        group.recipe.normalize is None
        and group.recipe.budget is None
        and group.recipe.score in ("magnitude", "random")
        for group in plan.groups
    )
    emptied = _nearly_empty(plan, tensors) if is_raw else _collapsed(plan, tensors)
    return (*emptied, *_sparse_before(tensors))


def advice_about(plan: Plan, tensors: Sequence[TensorReport]) -> str:
    """What may help if raw magnitudes emptied a tensor; "" if they did not."""
    raw = [
        tensor
        for tensor in _of_collapsed(plan, tensors)
        if plan.groups[tensor.group].recipe.normalize is None
        and plan.groups[tensor.group].recipe.is_normalizable
    ]
    if not raw:
        return ""
    shown = _shown(raw)
    are_weights = all(plan.groups[tensor.group].recipe.ranks_magnitudes for tensor in raw)
    keep = "keeps" if len(raw) == 1 else "keep"
    option = "" if plan.recipe.groups else " (--normalize rms)"
    return (
        f"{shown} {keep} at most 1 %, because raw {'magnitudes' if are_weights else 'scores'} were "
        f"ranked; normalize: rms{option} divides those of each tensor by their rms, so that "
        "tensors of different scales compare."
    )


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


def _collapsed(plan: Plan, tensors: Sequence[TensorReport]) -> list[str]:
    """A warning about tensors that a ranking has emptied."""
    emptied = _of_collapsed(plan, tensors)
    if not emptied:
        return []
    keep = "keeps" if len(emptied) == 1 else "keep"
    are_weights = all(group.recipe.score in ("magnitude", "random") for group in plan.groups)
    what = "normalised weights" if are_weights else "scores"
    return [
        f"{_shown(emptied)} {keep} at most 1 %, because the {what} are "
        f"smaller than those of the other tensors. The model may be useless; {_remedy(plan)}"
    ]


def _remedy(plan: Plan) -> str:
    if all(group.recipe.tile is not None for group in plan.groups):  # which have no limits
        return (
            "scope layer prunes the same share of the tiles of every tensor, and exclude leaves it "
            "alone."
        )
    return (
        "limits.max_sparsity (--max-sparsity) bounds what a single tensor loses, and exclude "
        "leaves it alone."
    )


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


def _nearly_empty(plan: Plan, tensors: Sequence[TensorReport]) -> list[str]:
    """A warning about tensors that lost nearly all, in groups that did not."""
    emptied = [
        tensor
        for tensor in tensors
        if tensor.num_pruned > _NEARLY_ALL * tensor.num_elements
        and plan.groups[tensor.group].num_to_prune
        <= _NEARLY_ALL * plan.groups[tensor.group].num_elements
    ]
    if not emptied:
        return []
    lose = "loses" if len(emptied) == 1 else "lose"
    return [
        f"{_shown(emptied)} {lose} more than 99 %, because the weights are smaller than those of "
        f"the other tensors. The model may be useless; {_remedy(plan)}"
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
