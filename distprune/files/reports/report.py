"""What was done to a checkpoint, as plain values; the same for every number of ranks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distprune.files.checkpoints.checkpoint import SIDECAR
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.formats.header import load_json
from distprune.files.formats.typed import from_json
from distprune.files.planning import Plan
from distprune.files.ranking.deciding import Decision
from distprune.files.ranking.scores import KeyFormat
from distprune.files.ranking.streaming import Source
from distprune.files.reports.warning import Outcome, warnings_about

REPORT_FILE = f"{SIDECAR}/report.json"  # the same for every number of ranks
RUN_FILE = f"{SIDECAR}/run.json"
_MAX_BYTES = 200_000_000  # of either file; the report of 100,000 tensors has some 40 MB


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
        mtimes_ns: by name of any file of the source, when it was changed last: the digest can be
            derived again after the source was copied.
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
    mtimes_ns: dict[str, int]
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
    report = describe(plan, source, decision, records, run)
    for group, planned in zip(report.groups, plan.groups, strict=True):
        if group.num_pruned != planned.num_to_prune:
            raise OutputError(
                f"the records of what was done say that {group.num_pruned} elements were pruned; "
                f"the plan says {planned.num_to_prune}. They were changed during the run, and "
                "nothing is published. Run the same command with --discard, and then again without."
            )
    return report


def describe(
    plan: Plan,
    source: Source,
    decision: Decision | None,
    records: Sequence[dict[str, Any]],
    run: RunFacts,
) -> Report:
    """:func:`make_report` without a check that as many elements went as the plan says."""
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
        mtimes_ns=mtimes_of(plan),
        copied=tuple(other.name for other in plan.copied),
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
    cut = None if decision is None else decision.cuts[index]
    return GroupReport(
        index=index,
        num_elements=group.num_elements,
        num_pruned=num_pruned,
        threshold=_magnitude(source.group_format(index), cut.threshold if cut else None),
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
            found[int(text)] = _magnitude(source.format_of(int(text)), key), None
    for cut in decision.tensors if decision is not None else ():
        if cut.held_at is not None:
            key_format = source.format_of(cut.position)
            magnitude = _magnitude(key_format, cut.threshold if cut.num_ties else None)
            found[cut.position] = magnitude, cut.held_at
    return found


def _has_limits(plan: Plan, position: int) -> bool:
    return plan.groups[plan.tensors[position].group].has_limits


def mtimes_of(plan: Plan) -> dict[str, int]:
    """Times of change of all files of a source, by name, in nanoseconds."""
    files = plan.checkpoint.all_files
    return {file.name: file.mtime_ns for file in files}


def read_report(folder: str | Path) -> Report:
    """The report of a pruned checkpoint.

    Raises:
        CheckpointError: there is none, or it was changed into something else.
    """
    return parse_report(*(read_text(folder, name) for name in (REPORT_FILE, RUN_FILE)), str(folder))


def read_text(folder: str | Path, name: str) -> bytes:
    """A file that :func:`prune` wrote beside the masks.

    Args:
        folder: a pruned checkpoint.
        name: such as REPORT_FILE.

    Raises:
        CheckpointError: it is missing, cannot be read, or is too large for one.
    """
    try:
        path = Path(folder, name)
        if os.path.exists(path) and not os.path.isfile(path):
            raise CheckpointError(f"{folder}/{name} is no regular file.")
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no report ({name}: {error.strerror}); expected a folder that distprune "
            "pruned."
        ) from error
    if len(raw) > _MAX_BYTES:
        raise CheckpointError(f"{folder}/{name} has more than {_MAX_BYTES} bytes.")
    return raw


def parse_report(result: str | bytes, run: str | bytes, folder: str = "") -> Report:
    """A report from the texts of its two files.

    Args:
        folder: for messages.

    Raises:
        CheckpointError: they hold something else; names the value.
    """
    facts = _parsed(RunFacts, run, f"{folder}/{RUN_FILE}".lstrip("/"))
    return _parsed(Report, result, f"{folder}/{REPORT_FILE}".lstrip("/"), run=facts)


def _parsed(kind: Any, text: str | bytes, what: str, **more: Any) -> Any:
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    values = load_json(raw, what)
    try:
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
        if values.pop("schema", None) != 1:
            raise ValueError("expected schema 1")
        if kind is Report and values.get("kind") == "apply":
            raise CheckpointError(
                f"{what} tells of `distprune apply`, not of a pruning: its masks come from another "
                "checkpoint, and no recipe says what they have to be. Verify that checkpoint; "
                "`distprune diff` compares the weights of this one with its source."
            )
        if kind is Report and values.pop("status", None) != "complete":
            raise ValueError("expected status 'complete'")
        return from_json(kind, values, "", **more)
    except ValueError as error:
        raise CheckpointError(f"{what} is no report of distprune: {error}.") from error


def _magnitude(form: KeyFormat, key: int | None) -> float | None:
    """What JSON can hold of the magnitude of a key."""
    magnitude = None if key is None else form.magnitude_of(key)
    return None if magnitude is None or math.isinf(magnitude) else magnitude


def _gathered(records: Sequence[dict[str, Any]], what: str) -> dict[int, int]:
    """Sums by position; JSON made the positions into strings."""
    sums: dict[int, int] = {}
    for record in records:
        for position, count in record.get(what, {}).items():
            sums[int(position)] = sums.get(int(position), 0) + count
    return sums


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()
