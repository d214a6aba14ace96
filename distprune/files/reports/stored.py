"""The report of a pruned checkpoint, read from its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distprune.files.errors import CheckpointError
from distprune.files.formats.strict_json import load_json
from distprune.files.formats.typed import from_json
from distprune.files.reports.report import REPORT_FILE, RUN_FILE, Report, RunFacts

_MAX_BYTES = 200_000_000  # of either file; the report of 100,000 tensors has some 40 MB


def read_report(folder: str | Path) -> Report:
    """The report of a pruned checkpoint.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    return parse_report(read_text(folder, REPORT_FILE), read_text(folder, RUN_FILE), str(folder))


def read_text(folder: str | Path, name: str) -> bytes:
    """A file that :func:`prune` wrote beside the masks.

    Args:
        folder: a pruned checkpoint.
        name: such as REPORT_FILE.

    Raises:
        CheckpointError: it is missing, cannot be read, or is too large for such a file.
    """
    try:
        path = Path(folder, name)
        if os.path.exists(path) and not os.path.isfile(path):
            raise CheckpointError(f"{folder}/{name} is not a regular file.")
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
        result: of report.json.
        run: of run.json.
        folder: for messages.

    Raises:
        CheckpointError: they hold something else; names the value.
    """
    run_path, result_path = (f"{folder}/{name}".lstrip("/") for name in (RUN_FILE, REPORT_FILE))
    facts: RunFacts = _parsed(RunFacts, run, run_path)
    report: Report = _parsed(Report, result, result_path, run=facts)
    return report


def _parsed(kind: Any, text: str | bytes, path: str, **more: Any) -> Any:
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    values = load_json(raw, path)
    try:
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
        if values.pop("schema", None) != 1:
            raise ValueError("expected schema 1")
        if kind is Report and values.get("kind") == "apply":
            raise CheckpointError(
                f"{path} tells of `distprune apply`, not of a pruning: its masks come from another "
                "checkpoint, and no recipe says what they have to be. Verify that checkpoint; "
                "`distprune diff` compares the weights of this one with its source."
            )
        if kind is Report and values.pop("status", None) != "complete":
            raise ValueError("expected status 'complete'")
        return from_json(kind, values, "", **more)
    except ValueError as error:
        raise CheckpointError(f"{path} is no report of distprune: {error}.") from error
