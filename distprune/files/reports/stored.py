"""The report of a pruned checkpoint, read from its folder."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from distprune.files.errors import CheckpointError
from distprune.files.formats.strict_json import load_json
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
    report: Report = _parsed(Report, result, result_path, {"run": facts})
    return report


def _parsed(
    kind: Any, text: str | bytes, path: str, more: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """The dataclass that a file holds; ``more`` are fields of it that are in another file."""
    raw = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    values = load_json(raw, path)
    if not isinstance(values, dict):
        problem = "it holds no JSON object"
    elif values.pop("schema", None) != 1:
        problem = "expected schema 1"
    elif kind is Report and values.get("kind") == "apply":
        raise CheckpointError(
            f"{path} tells of `distprune apply`, not of a pruning: its masks come from another "
            "checkpoint, and no recipe says what they have to be. Verify that checkpoint; "
            "`distprune diff` compares the weights of this one with its source."
        )
    elif kind is Report and values.pop("status", None) != "complete":
        problem = "expected status 'complete'"
    else:
        try:
            return _validator(kind).validate_python({**values, **more})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))[:80]
            problem = f"{place} is {str(first['input'])[:80]}: {first['msg'][:80]}"
    raise CheckpointError(f"{path} is no report of distprune: {ascii(problem)[1:-1]}.")


@functools.cache
def _validator(kind: Any) -> SchemaValidator:
    """A validator of a dataclass by its annotations."""
    return SchemaValidator(_exact(TypeAdapter(kind).core_schema))


def _exact(schema: Any) -> Any:
    """A schema that takes no text for a number, no bool for an integer, and no unknown field.

    [Note: strict] pydantic's strict mode would refuse objects and lists of JSON as well, in the
    place of dataclasses and tuples, and its own parser of JSON refuses names that are not UTF-8.
    """
    if isinstance(schema, list):
        return [_exact(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {key: _exact(value) for key, value in schema.items()}
    if schema.get("type") in ("int", "float", "str", "bool"):
        exact["strict"] = True
    elif schema.get("type") == "dataclass-args":
        exact["extra_behavior"] = "forbid"
    return exact
