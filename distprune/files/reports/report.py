"""What was done to a checkpoint, as plain values; the same for every number of ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from distprune.files.checkpoints.checkpoint import SIDECAR, Checkpoint

REPORT_FILE = f"{SIDECAR}/report.json"  # the same for every number of ranks
RUN_FILE = f"{SIDECAR}/run.json"


@dataclass(frozen=True)
class TensorReport:
    """One pruned tensor.

    Attributes:
        name, dtype, shape, file: as in its header.
        num_elements: of the tensor.
        num_pruned: elements that were pruned.
        num_nan: elements that are NaN and were kept.
        threshold: the largest score that was pruned, of a tensor that was ranked on its own, or
            that a limit held: a magnitude unless the recipe has another score, in units of
            ``divisor`` if that is given; of tiles, the largest sum.
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
        num_elements: of its tensors.
        num_pruned: elements that were pruned, exactly as many as the plan said.
        threshold: the largest score that was pruned by the ranking of the group, if its tensors
            were ranked together by magnitude; None if they were not, or nothing was pruned by it.
            If the group is normalised, it is a multiple of each tensor's ``divisor``; of tiles, it
            is a sum.
        threshold_bits: the threshold as a key (the bits of the score, or the hash), in hexadecimal.
        num_ties: elements, or tiles, with that key; if the group has limits, only those that no
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

    @property
    def sparsity(self) -> float:
        return self.num_pruned / self.num_elements


@dataclass(frozen=True)
class RunFacts:
    """How a result was made; may differ from run to run.

    Attributes:
        num_ranks: of the run that finished it.
        seconds: of that run, by phase: "check" if it continued an earlier run, "count" and "write".
        peak_rss_bytes: of each of its ranks.
        num_bytes: that were written, over all runs, without the masks.
        versions: of Python, torch and numpy.
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
        digest: of the plan.
        recipe: with all defaults.
        num_elements: of the selected tensors.
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
            file, its mode and its number of tokens; ``scores``, with sizes, crc32 of headers and
            times of change. None without.
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

    def magnitude_cut_at(self, tensor: TensorReport) -> float | None:
        """About where the magnitudes (the raw scores) of a tensor were cut; None if unknown.

        Args:
            tensor: of this report.
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
        for tensor in values["tensors"]:
            if tensor["divisor"] is None:  # as in reports from before there were any
                del tensor["divisor"]
        return as_json({"schema": 1, "status": "complete", **values})

    def run_json(self) -> bytes:
        """The content of run.json."""
        return self.run.to_json()


def identity_of(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """What tells one source from another: size and crc32 of the header of each weight file."""
    return {
        file.name: {"size": file.size, "header_crc32": file.header_crc} for file in checkpoint.files
    }


def as_json(values: dict[str, Any]) -> bytes:
    """A file of JSON as all commands write it."""
    return (json.dumps(values, indent=1) + "\n").encode()
