"""The report of a step, from the reports of its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distprune._common.amount import FLOOR
from distprune.call.report import PruningReport


def with_floors(report: PruningReport) -> PruningReport:
    """The report of a pruning to which floors were passed as ceilings."""
    entries = (
        replace(
            entry,
            held_at=entry.held_at and FLOOR,
            min_sparsity=entry.max_sparsity,
            max_sparsity=None,
        )
        for entry in report.parameters
    )
    return replace(report, parameters=tuple(entries))


def merged(reports: Sequence[PruningReport]) -> PruningReport:
    """One report for all groups that were pruned at a step."""
    if len(reports) == 1:
        return reports[0]
    return PruningReport(
        method=", ".join(dict.fromkeys(report.method for report in reports)),
        amount=sum(int(report.amount or 0) for report in reports),
        parameters=tuple(entry for report in reports for entry in report.parameters),
        threshold=None,
        num_ties=0,
        num_ties_pruned=0,
        num_ranks=reports[0].num_ranks,
        num_collectives=sum(report.num_collectives for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        seconds=sum(report.seconds for report in reports),
        collapsed=tuple(name for report in reports for name in report.collapsed),
    )
