"""What was done to a checkpoint, as plain values; the same for every number of ranks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distprune.files.checkpoint import SIDECAR
from distprune.files.deciding import Decision
from distprune.files.errors import CheckpointError
from distprune.files.header import load_json
from distprune.files.planning import Plan
from distprune.files.scores import KeyFormat
from distprune.files.streaming import Source
from distprune.files.typed import from_json

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
        threshold: the largest magnitude that went, of a tensor that was ranked on its own; None if
            it is infinite, for which JSON has no number.
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
        digest: of the plan: of the recipe, and of the names, sizes, headers and times of change of
            the source's files.
        recipe: with all defaults.
        num_elements: of the selected tensors.
        num_pruned: exactly what the plan said.
        threshold: the largest magnitude that went, if all were ranked together by magnitude;
            None if it is infinite, for which JSON has no number.
        threshold_bits: ... as a key (the bits of the magnitude, or the hash), in hexadecimal.
        num_ties: elements with that key ...
        num_ties_pruned: ... and how many of them went.
        tensors: the pruned ones, in the order of ranking.
        kept: (name, reason) of the other tensors.
        source: by name of a weight file, its size and the crc32 of its header.
        mtimes_ns: by name of any file of the source, when it was changed last: the digest can be
            derived again after the source was copied.
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
    mtimes_ns: dict[str, int]
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

    Raises:
        CheckpointError: the records do not add up to what the plan says.
    """
    report = describe(plan, source, decision, records, run)
    if report.num_pruned != plan.num_to_prune:
        raise CheckpointError(
            f"the journals say that {report.num_pruned} elements were pruned; expected "
            f"{plan.num_to_prune}. They or the source were changed: delete the partial folder and "
            "run the same command again."
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
                threshold=_magnitude(source.format(position), key),
            )
        )
    total = sum(tensor.num_pruned for tensor in tensors)
    cut = decision if decision is not None and plan.num_to_prune else None
    return Report(
        digest=plan.digest,
        recipe=asdict(plan.recipe),
        num_elements=plan.num_elements,
        num_pruned=total,
        threshold=None if cut is None else _magnitude(source.format(), cut.threshold),
        threshold_bits=None if cut is None else hex(cut.threshold),
        num_ties=None if cut is None else cut.num_ties,
        num_ties_pruned=None if cut is None else sum(cut.quotas),
        tensors=tuple(tensors),
        kept=tuple((c.entry.name, c.reason) for c in plan.choices if not c.is_pruned),
        source={
            file.name: {"size": file.size, "header_crc32": file.header_crc}
            for file in plan.checkpoint.files
        },
        mtimes_ns=mtimes_of(plan),
        copied=tuple(other.name for other in plan.checkpoint.others),
        skipped=plan.checkpoint.skipped,
        run=run,
    )


def mtimes_of(plan: Plan) -> dict[str, int]:
    """Times of change of all files of a source, by name, in nanoseconds."""
    files = (*plan.checkpoint.files, *plan.checkpoint.others)
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
