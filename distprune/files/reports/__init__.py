"""What was done to a checkpoint, as plain values; the same for every number of ranks.

The report is made of what was counted in each weight file, written to two files of JSON beside the
masks, and read from them.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distprune.files.checkpoints.checkpoint import SIDECAR, Checkpoint
from distprune.files.checkpoints.header import load_json
from distprune.files.errors import CheckpointError, SelectionError
from distprune.files.recipe import FileRecipe
from distprune.files.text import printable

REPORT_FILE = f"{SIDECAR}/report.json"  # the same for every number of ranks
RUN_FILE = f"{SIDECAR}/run.json"


@dataclass(frozen=True)
class TensorReport:
    """One pruned tensor.

    Attributes:
        name, dtype, shape, file: as in its header.
        num_elements: how many elements the tensor has.
        num_pruned: elements that were pruned.
        num_nan: elements that are NaN and were kept.
        threshold: the largest score that was pruned, of a tensor that was ranked on its own, or
            that a limit held: a magnitude unless the recipe has another score, in units of
            ``divisor`` if that is given.
        num_zero: elements that were zero in the source.
        group: number of the tensor's group.
        limits: how many elements had to be pruned, and how many at most; None: no limits were
            given.
        held_at: the limit that decided how many were pruned, "min_sparsity" or "max_sparsity";
            None: the ranking decided.
        divisor: what its magnitudes were divided by before they were ranked (their rms, their l2
            norm or their mean, as the recipe says); None: by nothing. The scores were
            ``fp32(magnitude * fp32(1 / divisor))``, where the inverse has the digits of an fp32
            and any exponent. Other raw scores were divided likewise.
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
    divisor: float | None = None

    @property
    def sparsity(self) -> float:
        return self.num_pruned / self.num_elements


@dataclass(frozen=True)
class GroupReport:
    """One group of the recipe; the only one if the recipe has none.

    Attributes:
        index: its number in the recipe, from 0.
        num_elements: how many elements its tensors have.
        num_pruned: elements that were pruned, exactly as many as the plan said.
        threshold: the largest score that was pruned by the ranking of the group, if its tensors
            were ranked together by magnitude; None if they were not, or nothing was pruned by it.
            If the group is normalised, it is a multiple of each tensor's ``divisor``.
        threshold_bits: the threshold as a key (the bits of the score, or the hash), in hexadecimal.
        num_ties: elements with that key; if the group has limits, only those that no
            limit decided on.
        num_ties_pruned: how many of these ties were pruned.
    """

    index: int
    num_elements: int
    num_pruned: int
    threshold: float | None
    threshold_bits: str | None
    num_ties: int | None
    num_ties_pruned: int | None


@dataclass(frozen=True)
class RunFacts:
    """How a result was made; may differ from run to run.

    Attributes:
        num_ranks: how many ranks the run had that finished it.
        seconds: how long that run took, by phase: "count" if it pruned by scores, and "write".
        peak_rss_bytes: the peak memory of each of its ranks.
        num_bytes: how many bytes were written, over all runs, without the masks.
        versions: the versions of Python, torch and numpy.
    """

    num_ranks: int
    seconds: dict[str, float]
    peak_rss_bytes: list[int]
    num_bytes: int
    versions: dict[str, str]

    def to_json(self) -> bytes:
        """The content of run.json."""
        return as_json({"schema": 1, **asdict(self)})


@dataclass(frozen=True)
class Report:
    """A finished pruning.

    Attributes:
        digest: the digest of the plan.
        recipe: with all defaults.
        num_elements: how many elements the selected tensors have.
        num_pruned: elements that were pruned, exactly as many as the plan said.
        threshold, threshold_bits, num_ties, num_ties_pruned: those of the group, if there is one.
        tensors: the pruned ones, group by group, in the order of ranking.
        kept: (name, reason) of the other tensors.
        source: by name of a weight file, its size and the crc32 of its header.
        mtimes_ns: by name of a file of the source, when it was last changed; the digest can then be
            derived again after the source was copied.
        copied: other files that were copied.
        skipped: (name, reason) of files that were not.
        run: how the result was made; not in report.json.
        groups: those of the recipe, in its order.
        warnings: what may be wrong with the result, one or two sentences each.
        inputs: what scores were made from besides weights: ``statistics``, with the sha256 of the
            file, its mode and its number of tokens, or of gradients their weight; ``scores``, with
            sizes, crc32 of headers and times of change; ``update``, what was done to the kept
            weights, and the tensors where they are others than in the source. None without.
        checksums: (position of such a tensor, crc32 of what was written of it); None without.
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
    inputs: dict[str, Any] | None = None
    checksums: tuple[tuple[int, int], ...] | None = None

    def magnitude_cut_at(self, tensor: TensorReport) -> float | None:
        """About where the magnitudes (the raw scores) of a tensor were cut; None if unknown.

        Args:
            tensor: one of this report.
        """
        threshold = tensor.threshold
        if threshold is None and tensor.held_at is None:
            threshold = next(g.threshold for g in self.groups if g.index == tensor.group)
        if threshold is None:
            return None
        return threshold * (1.0 if tensor.divisor is None else tensor.divisor)

    def result_json(self) -> bytes:
        """The content of report.json."""
        values = asdict(self)
        del values["run"]
        if self.inputs is None:  # as in reports from before there were any
            del values["inputs"]
        if self.checksums is None:
            del values["checksums"]
        for tensor in values["tensors"]:
            if tensor["divisor"] is None:  # as in reports from before there were any
                del tensor["divisor"]
        return as_json({"schema": 1, "status": "complete", **values})


def identity_of(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """What tells one source from another: size and crc32 of the header of each weight file."""
    return {
        file.name: {"size": file.size, "header_crc32": file.header_crc} for file in checkpoint.files
    }


def as_json(values: dict[str, Any]) -> bytes:
    """A file of JSON as all commands write it."""
    return (json.dumps(values, indent=1) + "\n").encode()


Record = Mapping[str, Any]


def summed(records: Iterable[Record], what: str) -> Counter[int]:
    """One kind of count, summed over files, by position; JSON made the positions into strings."""
    sums: Counter[int] = Counter()
    for record in records:
        sums.update({int(position): count for position, count in record.get(what, {}).items()})
    return sums


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
        result: the text of report.json.
        run: the text of run.json.
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
    from pydantic import ValidationError

    values = load_json(text, path)
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
def _validator(kind: Any) -> Any:
    """A validator of a dataclass by its annotations; pydantic is needed to read reports alone."""
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

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


def recipe_of(report: Report, folder: str) -> FileRecipe:
    """The recipe in a report.

    Args:
        report: the report of a result.
        folder: the folder of the result, for messages.

    Raises:
        CheckpointError: the recipe is invalid.
    """
    unknown = set(report.recipe) - {field.name for field in fields(FileRecipe)}
    if unknown:
        raise CheckpointError(
            f"the recipe in {folder}/{REPORT_FILE} has an unknown field {printable(min(unknown))}."
        )
    try:
        return FileRecipe(**report.recipe)
    except SelectionError as error:
        problems = error.problems or (error.headline,)
        headline = f"the recipe in {folder}/{REPORT_FILE} is invalid:"
        raise CheckpointError(headline, problems) from error
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"the recipe in {folder}/{REPORT_FILE} is invalid: {error}."
        ) from error
