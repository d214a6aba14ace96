"""What was done to a checkpoint, as plain values; the same for every number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distprune.files.checkpoint import SIDECAR
from distprune.files.deciding import Decision
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.planning import Plan
from distprune.files.streaming import Source
from distprune.files.warning import Outcome, warnings_about

REPORT_FILE = f"{SIDECAR}/report.json"  # the same for every number of ranks
RUN_FILE = f"{SIDECAR}/run.json"


@dataclass(frozen=True)
class TensorReport:
    """One pruned tensor.

    Attributes:
        name, dtype, shape, file: as in its header.
        num_elements: all.
        num_pruned: that are zero now because they were pruned.
        num_nan: that are NaN, and were kept.
        threshold: the largest magnitude that went, of a tensor that was ranked on its own, or that
            a limit held.
        num_zero: that were zero in the source.
        group: number of the group that it is in.
        limits: how many elements had to, and might, go; None: no limits were given.
        held_at: the limit that decided how many went, "min_sparsity" or "max_sparsity"; None: the
            ranking decided.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    num_elements: int
    num_pruned: int
    num_nan: int
    threshold: float | None
    num_zero: int = 0
    group: int = 0
    limits: tuple[int, int] | None = None
    held_at: str | None = None

    @property
    def sparsity(self) -> float:
        return self.num_pruned / self.num_elements


@dataclass(frozen=True)
class GroupReport:
    """One group of the recipe; the only one if it has none.

    Attributes:
        index: its number in the recipe, from 0.
        num_elements: of its tensors.
        num_pruned: exactly what the plan said.
        threshold: the largest magnitude that the ranking of the group let go, if its tensors were
            ranked together by magnitude; None if they were not, or nothing went by it.
        threshold_bits: ... as a key (the bits of the magnitude, or the hash), in hexadecimal.
        num_ties: elements with that key ...
        num_ties_pruned: ... and how many of them went. Where the group has limits, both are of
            those elements that no limit decided on.
    """

    index: int
    num_elements: int
    num_pruned: int
    threshold: float | None
    threshold_bits: str | None
    num_ties: int | None
    num_ties_pruned: int | None

    @property
    def sparsity(self) -> float:
        return self.num_pruned / self.num_elements


@dataclass(frozen=True)
class RunFacts:
    """How a result came about; may differ from run to run.

    Attributes:
        num_ranks: of the run that finished it.
        seconds: of that run, by phase: "check" if it went on, "count" and "write".
        peak_rss_bytes: of each of its ranks.
        num_bytes: that were written, over all runs, masks aside.
        versions: of Python, torch and numpy.
    """

    num_ranks: int
    seconds: dict[str, float]
    peak_rss_bytes: list[int]
    num_bytes: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Report:
    """A finished pruning.

    Attributes:
        digest: of the plan.
        recipe: with all defaults.
        num_elements: of the selected tensors.
        num_pruned: exactly what the plan said.
        threshold, threshold_bits, num_ties, num_ties_pruned: those of the group, if there is one.
        tensors: the pruned ones, group by group, in the order of ranking.
        kept: (name, reason) of the other tensors.
        source: by name of a weight file, its size and the crc32 of its header.
        copied: other files that were copied.
        skipped: (name, reason) of files that were not.
        run: how it came about; not in report.json.
        groups: those of the recipe, in its order.
        warnings: what may be wrong with the result, a sentence or two each.
    """

    digest: str
    recipe: dict[str, Any]
    num_elements: int
    num_pruned: int
    threshold: float | None
    threshold_bits: str | None
    num_ties: int | None
    num_ties_pruned: int | None
    tensors: tuple[TensorReport, ...]
    kept: tuple[tuple[str, str], ...]
    source: dict[str, dict[str, int]]
    copied: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    run: RunFacts
    groups: tuple[GroupReport, ...] = ()
    warnings: tuple[str, ...] = ()

    def result_json(self) -> bytes:
        """What report.json holds."""
        values = asdict(self)
        del values["run"]
        return _json({"schema": 1, "status": "complete", **values})

    def run_json(self) -> bytes:
        """What run.json holds."""
        return _json({"schema": 1, **asdict(self.run)})


def make_report(
    plan: Plan,
    source: Source,
    decision: Decision | None,
    records: Sequence[dict[str, Any]],
    run: RunFacts,
) -> Report:
    """Put together what all units tell.

    Args:
        records: of all units, each once, as they are in the journals.

    Raises:
        OutputError: they do not add up to what was planned.
    """
    pruned, num_nan, zero = (_gathered(records, what) for what in ("pruned", "nan", "zero"))
    tensors = []
    thresholds = _thresholds(plan, source, decision, records)
    for position, tensor in enumerate(plan.tensors):
        entry = tensor.entry
        if plan.recipe_of(position).is_together and decision is not None:
            num_nan[position] = decision.num_nan.get(entry.name, 0)
        limits = (tensor.lowest, tensor.highest) if _has_limits(plan, position) else None
        threshold, held_at = thresholds.get(position, (None, None))
        tensors.append(
            TensorReport(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                file=entry.file,
                num_elements=entry.numel,
                num_pruned=pruned.get(position, 0),
                num_nan=num_nan.get(position, 0),
                threshold=threshold,
                num_zero=zero.get(position, 0),
                group=tensor.group,
                limits=limits,
                held_at=held_at,
            )
        )
    groups = [_group_report(plan, source, decision, i, tensors) for i in range(len(plan.groups))]
    only = groups[0] if len(groups) == 1 else None
    return Report(
        digest=plan.digest,
        recipe=asdict(plan.recipe),
        num_elements=plan.num_elements,
        num_pruned=sum(group.num_pruned for group in groups),
        threshold=only.threshold if only else None,
        threshold_bits=only.threshold_bits if only else None,
        num_ties=only.num_ties if only else None,
        num_ties_pruned=only.num_ties_pruned if only else None,
        tensors=tuple(tensors),
        kept=tuple((c.entry.name, c.reason) for c in plan.choices if not c.is_pruned),
        source={
            file.name: {"size": file.size, "header_crc32": file.header_crc}
            for file in plan.checkpoint.files
        },
        copied=tuple(other.name for other in plan.checkpoint.others),
        skipped=plan.checkpoint.skipped,
        run=run,
        groups=tuple(groups),
        warnings=warnings_about(
            plan,
            [
                Outcome(each.name, each.num_elements, each.num_pruned, each.num_zero, each.group)
                for each in tensors
            ],
        ),
    )


def _group_report(
    plan: Plan,
    source: Source,
    decision: Decision | None,
    index: int,
    tensors: Sequence[TensorReport],
) -> GroupReport:
    group = plan.groups[index]
    num_pruned = sum(tensor.num_pruned for tensor in tensors[group.first : group.last])
    if num_pruned != group.num_to_prune:
        raise OutputError(
            f"the records of what was done say that {num_pruned} elements were pruned; the plan "
            f"says {group.num_to_prune}. They were changed during the run, and nothing is "
            "published. Run the same command with --discard, and then again without."
        )
    cut = None if decision is None else decision.cuts[index]
    return GroupReport(
        index=index,
        num_elements=group.num_elements,
        num_pruned=num_pruned,
        threshold=None if cut is None else source.format(group=index).magnitude_of(cut.threshold),
        threshold_bits=None if cut is None else hex(cut.threshold),
        num_ties=None if cut is None else cut.num_ties,
        num_ties_pruned=None if cut is None else cut.num_ties_pruned,
    )


def _thresholds(
    plan: Plan, source: Source, decision: Decision | None, records: Sequence[dict[str, Any]]
) -> dict[int, tuple[float | None, str | None]]:
    """By position: the largest magnitude that went of a tensor by itself, and the limit at work."""
    found: dict[int, tuple[float | None, str | None]] = {}
    for record in records:
        for text, key in record.get("threshold", {}).items():
            found[int(text)] = source.format(int(text)).magnitude_of(key), None
    for cut in decision.tensors if decision is not None else ():
        if cut.held_at is not None:
            largest = source.format(group=plan.tensors[cut.position].group)
            magnitude = largest.magnitude_of(cut.threshold) if cut.num_ties else None
            found[cut.position] = magnitude, cut.held_at
    return found


def _has_limits(plan: Plan, position: int) -> bool:
    return plan.groups[plan.tensors[position].group].has_limits


def read_report(folder: str | Path) -> Report:
    """The report of a pruned checkpoint.

    Raises:
        CheckpointError: there is none, or it was changed.
    """
    try:
        texts = [Path(folder, name).read_text() for name in (REPORT_FILE, RUN_FILE)]
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no report ({REPORT_FILE}: {error.strerror}); expected a folder that "
            "distprune pruned."
        ) from error
    return parse_report(*texts)


def parse_report(result: str, run: str) -> Report:
    """A report from the texts of its two files.

    Raises:
        CheckpointError: they hold something else.
    """
    try:
        values, facts = json.loads(result), json.loads(run)
        for table in (values, facts):
            if table.pop("schema") != 1:
                raise ValueError("expected schema 1")
        del values["status"]
        values["tensors"] = tuple(
            TensorReport(**tensor | {f: _tuple(tensor.get(f)) for f in ("shape", "limits")})
            for tensor in values["tensors"]
        )
        values["groups"] = tuple(GroupReport(**group) for group in values.get("groups", ()))
        for field in ("kept", "skipped"):
            values[field] = tuple((name, reason) for name, reason in values[field])
        for field in ("copied", "warnings"):
            values[field] = tuple(values.get(field, ()))
        return Report(**values, run=RunFacts(**facts))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"this is no report of distprune: {error}.") from error


def _tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _gathered(records: Sequence[dict[str, Any]], what: str) -> dict[int, int]:
    """Sums by position; JSON made the positions into strings."""
    sums: dict[int, int] = {}
    for record in records:
        for position, count in record.get(what, {}).items():
            sums[int(position)] = sums.get(int(position), 0) + count
    return sums


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()
