"""A report, put together from a plan, the cuts of its groups, and the records of all units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
from distprune.files.reports.warning import warnings_about
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
        if group.recipe.is_together:
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
