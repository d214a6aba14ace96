"""What was done to a checkpoint, as plain values; the same for every number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distprune.files.checkpoint import SIDECAR
from distprune.files.deciding import Decision
from distprune.files.errors import CheckpointError
from distprune.files.planning import Plan
from distprune.files.streaming import Source

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
        threshold: the largest magnitude that went, of a tensor that was ranked on its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    num_elements: int
    num_pruned: int
    num_nan: int
    threshold: float | None

    @property
    def sparsity(self) -> float:
        return self.num_pruned / self.num_elements


@dataclass(frozen=True)
class RunFacts:
    """How a result came about; may differ from run to run.

    Attributes:
        num_ranks: of the run that finished it.
        seconds: of that run, by phase: "count" and "write".
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
        threshold: the largest magnitude that went, if all were ranked together by magnitude.
        threshold_bits: ... as a key (the bits of the magnitude, or the hash), in hexadecimal.
        num_ties: elements with that key ...
        num_ties_pruned: ... and how many of them went.
        tensors: the pruned ones, in the order of ranking.
        kept: (name, reason) of the other tensors.
        source: by name of a weight file, its size and the crc32 of its header.
        copied: other files that were copied.
        skipped: (name, reason) of files that were not.
        run: how it came about; not in report.json.
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
    """
    pruned, num_nan = _gathered(records, "pruned"), _gathered(records, "nan")
    thresholds: dict[int, int] = {}
    for record in records:
        thresholds |= {int(p): key for p, key in record.get("threshold", {}).items()}
    tensors = []
    for position, tensor in enumerate(plan.tensors):
        entry = tensor.entry
        key = thresholds.get(position)
        if decision is not None:
            num_nan[position] = decision.num_nan.get(entry.name, 0)
        tensors.append(
            TensorReport(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                file=entry.file,
                num_elements=entry.numel,
                num_pruned=pruned.get(position, 0),
                num_nan=num_nan.get(position, 0),
                threshold=None if key is None else source.format(position).magnitude_of(key),
            )
        )
    total = sum(tensor.num_pruned for tensor in tensors)
    assert total == plan.num_to_prune, (total, plan.num_to_prune)
    cut = decision if decision is not None and plan.num_to_prune else None
    return Report(
        digest=plan.digest,
        recipe=asdict(plan.recipe),
        num_elements=plan.num_elements,
        num_pruned=total,
        threshold=None if cut is None else source.format().magnitude_of(cut.threshold),
        threshold_bits=None if cut is None else hex(cut.threshold),
        num_ties=None if cut is None else cut.num_ties,
        num_ties_pruned=None if cut is None else sum(cut.quotas),
        tensors=tuple(tensors),
        kept=tuple((c.entry.name, c.reason) for c in plan.choices if not c.is_pruned),
        source={
            file.name: {"size": file.size, "header_crc32": file.header_crc}
            for file in plan.checkpoint.files
        },
        copied=tuple(other.name for other in plan.copied),
        skipped=plan.checkpoint.skipped,
        run=run,
    )


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
            TensorReport(**tensor | {"shape": tuple(tensor["shape"])})
            for tensor in values["tensors"]
        )
        for field in ("kept", "skipped"):
            values[field] = tuple((name, reason) for name, reason in values[field])
        values["copied"] = tuple(values["copied"])
        return Report(**values, run=RunFacts(**facts))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"this is no report of distprune: {error}.") from error


def _gathered(records: Sequence[dict[str, Any]], what: str) -> dict[int, int]:
    """Sums by position; JSON made the positions into strings."""
    sums: dict[int, int] = {}
    for record in records:
        for position, count in record.get(what, {}).items():
            sums[int(position)] = sums.get(int(position), 0) + count
    return sums


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()
