"""Masks that exist, on another checkpoint: a copy of it with zeros where they are zero."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distprune._common.collectives import Communicator, world
from distprune._common.float_formats import PLAIN_FLOATS
from distprune.files.checkpoints.checkpoint import Checkpoint, OtherFile, open_checkpoint
from distprune.files.checkpoints.mask_files import (
    MASK_FILE,
    MaskFile,
    MaskLayout,
    MaskWriter,
    mask_layout,
    open_masks,
    read_keep,
)
from distprune.files.disk.access import WRITE
from distprune.files.disk.destination import resolve_destination
from distprune.files.disk.open_files import OpenFiles, copy_range, read_into, write_from
from distprune.files.errors import CheckpointError, headline
from distprune.files.formats.header import TensorEntry, read_header
from distprune.files.ranking.units import CopyUnit, Span, copy_units
from distprune.files.reports.report import RunFacts
from distprune.files.results.partial import Partial
from distprune.files.results.resuming import carry_out, versions
from distprune.files.results.task import Task
from distprune.files.team import Progress, Team

_CHUNK = 1 << 20  # elements; a multiple of 8
_UNIT_ELEMENTS = 1 << 23
_VERSION = 1  # raised when the same masks and source would give other bytes


@dataclass(frozen=True)
class MaskedTensor:
    """A tensor that has a mask."""

    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class MaskUnit:
    """Elements to put masks on.

    Attributes:
        spans: a span's position counts the masked tensors.
        num_bytes: of the elements.
    """

    spans: tuple[Span, ...]
    num_bytes: int


@dataclass(frozen=True)
class Applied:
    """What :meth:`Application.write` did.

    Attributes:
        num_elements: of the tensors that have a mask.
        num_pruned: by the masks.
        num_zeroed: of these, how many were not zero before.
        num_tensors: that have a mask.
    """

    num_elements: int
    num_pruned: int
    num_zeroed: int
    num_tensors: int


class Application:
    """Masks and the checkpoint that they are for, checked; nothing is written yet.

    Args:
        masks: a folder that ``distprune prune`` or ``save_masks`` wrote.
        source: the checkpoint.
        follow_links: copy what lies behind links that leave the source, too.

    Attributes:
        digest: of all that decides the result: headers, sizes and times of change of both, and
            where the masks are.

    Raises:
        CheckpointError: either is malformed, or they do not fit; all problems.
    """

    def __init__(
        self, masks: str | Path, source: str | Path, *, follow_links: bool = False
    ) -> None:
        self.masks: MaskFile = open_masks(masks)
        self.checkpoint: Checkpoint = open_checkpoint(source, follow_links=follow_links)
        entries = {entry.name: entry for entry in self.checkpoint.tensors}
        problems = []
        for name, shape in self.masks.shapes.items():
            entry = entries.get(name)
            if entry is None:
                problems.append(f"the checkpoint has no tensor {name}.")
            elif entry.shape != shape:
                problems.append(
                    f"tensor {name} is {list(entry.shape)}, but its mask {list(shape)}."
                )
            elif entry.dtype not in PLAIN_FLOATS:
                problems.append(f"tensor {name} is {entry.dtype}; expected a plain float.")
        if problems:
            shown = problems[:12]
            if len(problems) > len(shown):
                shown.append(f"{len(problems) - len(shown)} more do not fit.")
            what = headline(f"{masks} on {source}", problems)
            raise CheckpointError(what, shown)
        self.tensors = tuple(MaskedTensor(entries[name]) for name in self.masks.shapes)
        self.num_elements = sum(tensor.entry.numel for tensor in self.tensors)
        self._folder = os.path.abspath(masks)
        self._masks_state = _state(self.masks.path)
        self.digest = self._make_digest()

    def write(
        self,
        destination: str | Path,
        *,
        communicator: Communicator | None = None,
        progress: Callable[[Progress], None] | None = None,
        stop: Callable[[], bool] | None = None,
        take_over: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> Applied:
        """Write the copy. It appears by one rename at the end, or not at all.

        ``destination/distprune/`` holds the masks, the report and, as the recipe, which masks were
        applied. All files but ``distprune/run.json`` are the same to the byte for every number of
        ranks and after any interruption. The arguments are those of
        :func:`distprune.files.pruning.prune`.

        Raises:
            CheckpointError: the source or the masks cannot be read, or have changed.
            OutputError: the destination is taken or in use, or the disk full.
            RanksError: the ranks were called differently, or one was lost.
            Interrupted: ``stop`` said so; the next call goes on.
            On every rank, but for a lost one. The text says what is left on the disk.

        Cost: one read, one write, and one read of what an interrupted run had done; some 50 MB of
        memory per process.
        """
        team = Team(communicator or world(), progress, stop)
        target = resolve_destination(destination)
        team.compare(
            [("destination", ascii(str(target))), *versions().items(), ("plan", self.digest)]
        )
        entries = [tensor.entry for tensor in self.tensors]
        task = Task(
            checkpoint=self.checkpoint,
            digest=self.digest,
            tensors=entries,
            make_units=lambda: [*self.mask_units(), *copy_units(self)],  # type: ignore[arg-type]
            layout=mask_layout(entries, self.checkpoint.files),
            copied=self.checkpoint.others,
        )
        work = _Applying(self, task)
        try:
            text, _ = carry_out(team, task, work, target, take_over=take_over, tell=tell)
        finally:
            work.sources.close()
        report = json.loads(text)
        return Applied(
            num_elements=report["num_elements"],
            num_pruned=report["num_pruned"],
            num_zeroed=report["num_zeroed"],
            num_tensors=len(report["tensors"]),
        )

    @property
    def copied(self) -> tuple[OtherFile, ...]:
        """The files without weights that are copied."""
        return self.checkpoint.others

    def mask_units(self) -> list[MaskUnit]:
        """All masked elements, cut into units of about equal size."""
        units: list[MaskUnit] = []
        spans: list[Span] = []
        num_bytes, missing = 0, _UNIT_ELEMENTS
        for position, tensor in enumerate(self.tensors):
            numel, first = tensor.entry.numel, 0
            while first < numel:
                last = min(first + -(-missing // 8) * 8, numel)
                spans.append(Span(position, first, last))
                num_bytes += (last - first) * PLAIN_FLOATS[tensor.entry.dtype].num_bytes
                missing -= last - first
                first = last
                if missing <= 0:
                    units.append(MaskUnit(tuple(spans), num_bytes))
                    spans, num_bytes, missing = [], 0, _UNIT_ELEMENTS
        if spans:
            units.append(MaskUnit(tuple(spans), num_bytes))
        return units

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the masks are not those that were looked at."""
        if _state(self.masks.path) != self._masks_state:
            raise CheckpointError(
                f"{self.masks.path} has changed since its header was read; expected masks that "
                "stay as they are."
            )

    def recipe_yaml(self) -> bytes:
        """What recipe.yaml holds: which masks were applied."""
        lines = (
            "# What `distprune apply` was given.",
            "kind: apply",
            f"masks: {json.dumps(self._folder)}",
            f"masks_header_crc32: {self._masks_crc()}",
        )
        return ("\n".join(lines) + "\n").encode()

    def report_json(self, records: list[dict[str, Any]]) -> bytes:
        """What report.json holds.

        Args:
            records: of all units.
        """
        counts = {what: [0] * len(self.tensors) for what in ("pruned", "zeroed")}
        for record in records:
            for what, of_all in counts.items():
                for position, count in record.get(what, {}).items():
                    of_all[int(position)] += count
        tensors = [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": entry.shape,
                "file": entry.file,
                "num_elements": entry.numel,
                "num_pruned": counts["pruned"][position],
                "num_zeroed": counts["zeroed"][position],
            }
            for position, entry in enumerate(tensor.entry for tensor in self.tensors)
        ]
        report = {
            "schema": 1,
            "status": "complete",
            "kind": "apply",
            "digest": self.digest,
            "masks": {"folder": self._folder, "header_crc32": self._masks_crc()},
            "num_elements": self.num_elements,
            "num_pruned": sum(counts["pruned"]),
            "num_zeroed": sum(counts["zeroed"]),
            "tensors": tensors,
            "source": {
                file.name: {"size": file.size, "header_crc32": file.header_crc}
                for file in self.checkpoint.files
            },
            "copied": [other.name for other in self.checkpoint.others],
            "skipped": self.checkpoint.skipped,
        }
        return (json.dumps(report, indent=1) + "\n").encode()

    def _masks_crc(self) -> int:
        return read_header(self.masks.path, self.masks.path).header_crc

    def _make_digest(self) -> str:
        checkpoint = self.checkpoint
        facts = {
            "kind": "apply",
            "version": _VERSION,
            "masks": [self._folder, *self._masks_state, self._masks_crc()],
            "weights": [[f.name, f.size, f.mtime_ns, f.header_crc] for f in checkpoint.files],
            "others": [[f.name, f.size, f.mtime_ns] for f in checkpoint.others],
        }
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class _Applying:
    """How masks are applied; see ``resuming.Work``."""

    def __init__(self, application: Application, task: Task) -> None:
        self.sources = OpenFiles(os.O_RDONLY)
        self._application = application
        self._task = task

    def bytes_to_prepare(self) -> int:
        return 0

    def prepare(self, partial: Partial, prepared: Any) -> None:
        """Nothing: masks say all."""

    def worker(self, folder: Path) -> _Applier:
        layout = self._task.layout
        assert layout is not None
        return _Applier(self._application, self.sources, folder, layout)

    def complete(self, partial: Partial, run: RunFacts) -> None:
        self._application.check_unchanged()
        report = self._application.report_json(partial.records())
        facts = (json.dumps({"schema": 1, **asdict(run)}, indent=1) + "\n").encode()
        partial.complete(self._application.recipe_yaml(), facts, report)


class _Applier:
    """Does units of work; counts what becomes zero."""

    def __init__(
        self, application: Application, sources: OpenFiles, folder: Path, layout: MaskLayout
    ) -> None:
        self.outputs = OpenFiles(WRITE)
        self._application = application
        self._sources = sources
        self._folder = folder
        self._layout = layout
        self._paths = {file.name: file.path for file in application.checkpoint.files}
        self._counts: dict[str, dict[int, int]] = {}

    def do(self, number: int, unit: MaskUnit | CopyUnit) -> Iterator[int]:
        """Do a unit; yields bytes."""
        self._counts = {"pruned": {}, "zeroed": {}}
        if isinstance(unit, CopyUnit):
            output = str(self._folder / unit.name)
            yield from copy_range(
                self._sources, unit.path, self.outputs, output, unit.start, unit.stop
            )
        else:
            for span in unit.spans:
                yield from self._apply(span)

    def record(self) -> dict[str, Any]:
        """Of the last unit, by position of a tensor: pruned, and not zero before."""
        return {what: counts for what, counts in self._counts.items() if counts}

    def _apply(self, span: Span) -> Iterator[int]:
        entry = self._application.tensors[span.position].entry
        form = PLAIN_FLOATS[entry.dtype]
        start = self._layout.starts[entry.name] + span.first // 8
        masks = MaskWriter(self.outputs, str(self._folder / MASK_FILE), start)
        num_pruned = num_zeroed = 0
        for first in range(span.first, span.last, _CHUNK):
            last = min(first + _CHUNK, span.last)
            raw = np.empty((last - first) * form.num_bytes, np.uint8)
            offset = entry.start + first * form.num_bytes
            read_into(self._sources, self._paths[entry.file], offset, memoryview(raw))
            keep = read_keep(self._application.masks, self._sources, entry.name, first, last)
            drop = ~keep
            num_pruned += int(np.count_nonzero(drop))
            num_zeroed += int(np.count_nonzero(form.magnitudes(raw)[drop]))
            raw.view(form.bits)[drop] = 0
            write_from(self.outputs, str(self._folder / entry.file), offset, memoryview(raw))
            masks.add(keep)
            yield raw.nbytes
        masks.finish()
        self._counts["pruned"][span.position] = num_pruned
        self._counts["zeroed"][span.position] = num_zeroed


def _state(path: str) -> tuple[int, int]:
    """Size and time of change."""
    try:
        info = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    return info.st_size, info.st_mtime_ns
