"""What was done to a checkpoint, as plain values.

The report is made of what was counted in each weight file, and is a file of JSON beside the masks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distprune.files.checkpoints.checkpoint import SIDECAR, Checkpoint
from distprune.files.checkpoints.header import load_json
from distprune.files.errors import CheckpointError
from distprune.recipes import Recipe
from distprune.recipes.loading import make_recipe

REPORT_FILE = f"{SIDECAR}/report.json"


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
        copied: other files that were copied.
        skipped: (name, reason) of files that were not.
        run: how the result was made; all else is the same for every number of ranks.
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

    def to_json(self) -> bytes:
        """The content of report.json."""
        return as_json({"schema": 1, "status": "complete", **asdict(self)})


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


def read_report(folder: str | Path) -> Report:
    """The report of a pruned checkpoint.

    Raises:
        CheckpointError: there is none, or it is malformed.
    """
    try:
        text = Path(folder, REPORT_FILE).read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{folder} has no report ({REPORT_FILE}: {error.strerror}); expected a folder that "
            "distprune pruned."
        ) from error
    return parse_report(text, f"{folder}/{REPORT_FILE}")


def parse_report(text: str | bytes, path: str = REPORT_FILE) -> Report:
    """A report from the text of report.json.

    Raises:
        CheckpointError: it holds something else.
    """
    from pydantic import TypeAdapter, ValidationError

    values = load_json(text, path)
    if isinstance(values, dict) and values.get("kind") == "apply":
        raise CheckpointError(
            f"{path} tells of `distprune apply`, not of a pruning: its masks come from another "
            "checkpoint, and no recipe says what they have to be. Verify that checkpoint; "
            "`distprune diff` compares the weights of this one with its source."
        )
    try:
        report: Report = TypeAdapter(Report).validate_python(values)
        return report
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:80]
        raise CheckpointError(
            f"{path} is no report of distprune: {ascii(where)[1:-1]}: {first['msg'][:80]}."
        ) from None


def recipe_of(report: Report, folder: str) -> Recipe:
    """The recipe in a report.

    Args:
        report: the report of a result.
        folder: the folder of the result, for messages.

    Raises:
        CheckpointError: the recipe is invalid.
    """
    try:
        return make_recipe(report.recipe, f"the recipe in {folder}/{REPORT_FILE}")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
