"""``prune`` and ``apply``: copies with zeros, file by file, on one process or all ranks together.

plan --> find_cuts --cuts--> files written --> partial folder --> destination
         (scope "global")    (each once)          (one rename)

A file has its name once it is finished, so that a later run makes those that are missing. What a
file holds depends on the task alone: the bytes of the result depend neither on interruptions nor on
the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import shutil
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distprune.base import memory
from distprune.base.memory import peak_rss_bytes
from distprune.base.selecting import PLAIN_FLOATS
from distprune.files import disk, errors, reports
from distprune.files.checkpoint import Checkpoint, SourceFile, TensorEntry
from distprune.files.mask_files import MASK_FILE, MaskFile, mask_header, open_masks, read_keep
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, KeptValues, Plan, digest_of
from distprune.files.ranked import FileValues, Piece, Pieces, RankedTensors
from distprune.files.reports import Counts, Report, TensorReport
from distprune.files.team import Progress, Team
from distprune.ranks.collectives import world

RECIPE_FILE = f"{disk.SIDECAR}/recipe.yaml"
# From what was counted, and what every report has: the report, and small files by name.
Complete = Callable[[Counts, dict[str, Any]], tuple[Report, dict[str, bytes]]]
_VERSION = 2  # of apply; raised when the same masks and source would give other bytes


def prune(
    plan: Plan,
    destination: str | Path,
    *,
    progress: Callable[[Progress], object] | None = None,
    replace: bool = False,
    tell: Callable[[str], None] | None = None,
    ranked: RankedTensors | None = None,
) -> Report:
    """Write a pruned copy of a checkpoint.

    The copy has the same files, headers and index; every byte is that of the source except in
    pruned elements, which become +0. Other files are copied. ``destination/distprune/`` has the
    masks, the recipe and the report, and the statistics of activations if the scores are made from
    them. All files but ``distprune/report.json``, which
    says how the run went, are the same to the byte for every number of ranks.

    The destination appears by one rename at the end, or not at all. The next call with the same
    plan makes the files that an interrupted run has not finished (in ``destination.partial``);
    :func:`~distprune.files.disk.discard` removes them. If the same plan has made the destination
    already, nothing is done.

    Args:
        plan: what to do; the same on every rank.
        destination: a name that is free, in a folder that exists and that all ranks see.
        progress: called about twice a second, with what this rank has done.
        replace: take the place of a finished result of another command at the destination, which
            stays until this one is complete. Nothing else is replaced: no input, and no folder that
            holds other files.
        tell: called with sentences for the user: that a run continues, or that nothing is left to
            do.
        ranked: the tensors of a plan for the same recipe and source, whose cuts are known.

    Returns:
        The report, the same on every rank.

    Raises:
        NaNError: a NaN in a selected tensor.
        CheckpointError: the source cannot be read, or has changed.
        OutputError: the destination is taken or in use, something is in the way, or the disk is
            full.
        RanksError: the ranks were called with different plans, or one was lost.
        Each is raised on every rank that is left. The text says what is left on the disk.

    Cost: reads weights twice and writes them once (row and N:M reads them once; normalised scores
    of 32 bits, which "wanda" and "stade" have, are read four times, and all once more if they are
    so many that the keys around the cut do not fit into memory). A killed run makes at most one
    file per rank again. Memory: a few hundred megabytes per process. Communication: an all-reduce
    of 40 bytes per file, and some of up to 32 KiB.
    """
    team = Team(world(), progress)
    tensors = ranked or RankedTensors(plan, team)
    inputs = [] if plan.statistics is None else [plan.statistics.file]
    inputs += [] if plan.given is None else plan.given.files

    def complete(counts: Counts, facts: dict[str, Any]) -> tuple[Report, dict[str, bytes]]:
        report = reports.make_report(plan, tensors.groups, counts, facts)
        small = {RECIPE_FILE: plan.recipe.as_stored().to_yaml().encode()}
        if plan.recipe.card:
            small[CARD_FILE] = reports.card_of(plan, report)
        if plan.statistics is not None:
            small[STATISTICS_FILE] = plan.statistics.data
        if plan.values is not None:
            small |= plan.values.files
        return report, small

    entries = {tensor.entry.name: tensor.entry for tensor in plan.tensors}
    what = plan.checkpoint, plan.digest, entries, plan.copied, inputs, plan.values
    result = Result(team, destination, replace, *what)

    def find_pieces() -> Pieces:
        if not tensors.groups:
            tensors.find_cuts()
        return tensors.pieces

    return result.make(plan.recipe.as_values(), tell, find_pieces, complete)


def apply(
    masks: str | Path,
    checkpoint: Checkpoint,
    destination: str | Path,
    *,
    progress: Callable[[Progress], object] | None = None,
    replace: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Write a copy of a checkpoint with zeros where the masks of another one are zero.

    ``destination/distprune/`` has the masks and the report. The destination appears, and a killed
    run goes on, as that of :func:`prune`.

    Args:
        masks: a folder that ``prune`` or ``save_masks`` wrote.
        checkpoint: the source.
        destination, progress, replace, tell: as for :func:`prune`.

    Raises:
        CheckpointError: the source or the masks cannot be read, do not fit, or have changed.
        OutputError: the destination is taken or in use, or the disk is full.
        RanksError: the ranks were called with different arguments, or one was lost.
        Each is raised on every rank that is left. The text says what is left on the disk.

    Cost: one read and one write; some 50 MB of memory per process.
    """
    team = Team(world(), progress)
    by_name = {entry.name: entry for entry in checkpoint.tensors}

    def read_masks() -> MaskFile:
        found = open_masks(masks)
        for name, shape in found.shapes.items():
            entry = by_name.get(name)
            if entry is None or entry.shape != shape or entry.dtype not in PLAIN_FLOATS:
                has = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise errors.CheckpointError(
                    f"{masks} has a mask {list(shape)} of {name}, and {checkpoint.folder} has "
                    f"{has} of this name; expected a plain float of this shape."
                )
        return found

    def complete(counts: Counts, facts: dict[str, Any]) -> tuple[Report, dict[str, bytes]]:
        tensors = tuple(TensorReport.of(entry, counts) for entry in entries.values())
        report = Report(
            **facts,
            kind="apply",
            num_elements=sum(tensor.num_elements for tensor in tensors),
            num_pruned=sum(tensor.num_pruned for tensor in tensors),
            tensors=tensors,
            inputs={"masks": origin},
        )
        return report, {}

    stored = team.run(read_masks)
    file, entries = stored.file, {name: by_name[name] for name in stored.shapes}
    origin = {"folder": os.path.abspath(masks), "header_crc32": file.header_crc}
    digest = digest_of(checkpoint, "apply", _VERSION, origin, file.size, file.mtime_ns)
    what = checkpoint, digest, entries, checkpoint.others, [file]
    result = Result(team, destination, replace, *what)
    return result.make({}, tell, lambda: functools.partial(masked_pieces, stored), complete)


def masked_pieces(masks: MaskFile, entry: TensorEntry) -> Iterator[Piece]:
    """The elements of a stored tensor, and what an existing mask keeps of them: as ``Pieces``."""
    values = FileValues(entry, lambda num_bytes: None)
    for run in disk.slabs(entry.numel, values.dtype.itemsize):
        keep = read_keep(masks, entry.name, run.start, run.stop)
        yield run.start, values.hold(run), keep


@dataclass
class Result:
    """A result to make.

    Attributes:
        team: the ranks that share the work.
        destination: as for :func:`prune`.
        replaces: whether it takes the place of a finished result.
        checkpoint: the source.
        digest: of everything that decides the result.
        tensors: those that are rewritten, by name.
        copied: files without weights that are copied.
        inputs: other files that it is made from.
        values: of kept elements, in place of those of the source.
        began: when this run began, in seconds of ``time.monotonic``.
    """

    team: Team
    destination: str | Path
    replaces: bool
    checkpoint: Checkpoint
    digest: str
    tensors: Mapping[str, TensorEntry]
    copied: Sequence[SourceFile]
    inputs: Sequence[SourceFile]
    values: KeptValues | None = None
    began: float = field(default_factory=time.monotonic)

    @functools.cached_property
    def files(self) -> dict[str, SourceFile]:
        """The files that are made of one of the source, by name."""
        return {file.name: file for file in (*self.checkpoint.files, *self.copied)}

    @functools.cached_property
    def target(self) -> Path:
        """The absolute path of the result."""
        return disk.resolve_destination(self.destination, self.checkpoint.root)

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the unfinished result."""
        return disk.partial_folder(self.target)

    def make(
        self,
        recipe: Mapping[str, Any],
        tell: Callable[[str], None] | None,
        find_pieces: Callable[[], Pieces],
        complete: Complete,
    ) -> Report:
        """Make the files that are missing, rename the folder, and read the report. Collective.

        Args:
            recipe: by which it is made, for a message where ranks differ.
            tell: as for :func:`prune`.
            find_pieces: finds out which elements of the tensors are kept. Collective.
            complete: makes the report and the small files of the result, by name.

        Raises:
            FilesError: of any kind, on every rank. Finished files stay for the next run, unless it
                would fail again.
        """
        team, tell = self.team, tell or (lambda text: None)
        target = team.run(lambda: self.target)
        facts = [("destination", ascii(str(target))), ("plan", self.digest)]
        team.compare([(f"recipe.{key}", repr(value)) for key, value in recipe.items()] + facts)
        with contextlib.ExitStack() as lock:
            done = team.from_leader(lambda: self._start(lock))
            if done is None:
                tell(f"{target} is finished: this command made it before. Nothing was changed.")
                return team.run(lambda: reports.read_report(target))
            missing = {name: file.size for name, file in self.files.items() if name not in done}
            total = sum(file.size for file in self.files.values())
            num_done = total - sum(missing.values())
            if done:
                done_of = " of ".join(map(errors.format_size, (num_done, total)))
                tell(f"Resuming: {done_of} are finished.")
            try:
                pieces = find_pieces()
                team.begin("write", total, num_done)
                team.each(missing, functools.partial(self._write, pieces))
                peaks = team.share(peak_rss_bytes())
                team.from_leader(lambda: self._publish(complete, peaks))
                return team.run(lambda: reports.read_report(target))
            except errors.RanksError:
                raise
            except errors.FilesError as error:
                would_fail_again = isinstance(error, (errors.NaNError, errors.SelectionError))
                has_files = any((self.folder / name).exists() for name in self.files)
                if has_files and not would_fail_again:
                    hint = f"run the same command again to resume, or {disk.DISCARD_HINT}."
                    text = f"{error} {self.folder} keeps the finished files: {hint}"
                    raise type(error)(text) from error
                if team.is_leader:
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise

    def _start(self, lock: contextlib.ExitStack) -> list[str] | None:
        """Lock the destination; the names of finished files, or None if the result is finished."""
        lock.enter_context(disk.locked(self.target))
        report = disk.finished_report(self.target)
        if report is not None and report["digest"] == self.digest:
            return None
        self._check_destination()
        disk.begin(self.target, self.digest, sum(file.size for file in self.files.values()))
        return [name for name in self.files if (self.folder / name).exists()]

    def _check_destination(self) -> None:
        files = [*self.checkpoint.all_files, *self.inputs]
        disk.check_destination(self.target, [f.path for f in files], replaces=self.replaces)

    def _write(self, pieces: Pieces, name: str) -> None:
        """Make one file; of a weight file also its masks, and counts of its tensors."""
        counts: Counts = defaultdict(Counter)
        file = self.files[name]
        with (
            disk.new_file(self.folder / file.name, file.mode) as output,
            disk.new_file(self._work(file, "masks")) as masks,
        ):
            for part in parts_of(file, self.tensors, pieces, counts):
                if isinstance(part, range):
                    for raw in disk.pieces_of(file.path, part.start, part.stop):
                        disk.write_all(output, raw)
                        self.team.count("write", len(raw))
                    continue
                entry, (first, bits, keep) = part
                own = None if self.values is None else self.values.tensors.get(entry.name)
                if own:
                    place = own.start + first * bits.itemsize
                    disk.read_into(own.path, [(place, bits.data.cast("B"))])
                np.multiply(bits, keep, out=bits)  # pruned bits are 0: +0 whatever the sign was
                if own:
                    add_checksum(counts, entry.name, bits)
                disk.write_all(output, bits.data)
                disk.write_all(masks, memory.pack(keep).data)
                self.team.count("write", bits.nbytes)
            disk.write_atomically(self._work(file, "json"), json.dumps(counts).encode())

    def _publish(self, complete: Complete, peaks: list[int]) -> None:
        """Write the last files and rename the folder; ``peaks`` of the memory of each rank."""
        check_unchanged([*self.checkpoint.all_files, *self.inputs])
        counts: Counts = defaultdict(Counter)
        for file in self.checkpoint.files:
            for what, of_tensors in json.loads(self._work(file, "json").read_text()).items():
                counts[what].update(of_tensors)
        facts = {
            "digest": self.digest,
            "source": reports.identity_of(self.checkpoint),
            "copied": [file.name for file in self.copied],
            "skipped": self.checkpoint.skipped,
            "run": {
                "num_ranks": self.team.size,
                "seconds": round(time.monotonic() - self.began, 3),
                "peak_rss_bytes": peaks,
                "versions": {"numpy": np.__version__, "torch": str(torch.__version__)},
            },
        }
        report, small = complete(counts, facts)
        self._join_masks()
        for name, data in (small | {disk.REPORT_FILE: report.to_json()}).items():
            disk.write_atomically(self.folder / name, data)
        self._check_destination()
        (self.folder / disk.WORK / "digest").unlink()  # without it, a later run begins anew
        shutil.rmtree(self.folder / disk.WORK)
        disk.publish(self.target)

    def _join_masks(self) -> None:
        """Join the masks of all weight files, in the order of the checkpoint."""
        mode = functools.reduce(operator.and_, (file.mode for file in self.checkpoint.files), 0o666)
        shapes = {e.name: e.shape for e in self.checkpoint.tensors if e.name in self.tensors}
        with disk.new_file(self.folder / MASK_FILE, mode) as output:
            disk.write_all(output, mask_header(shapes, is_of_checkpoint=True))
            for path in (str(self._work(file, "masks")) for file in self.checkpoint.files):
                for raw in disk.pieces_of(path, 0, os.path.getsize(path)):
                    disk.write_all(output, raw)

    def _work(self, file: SourceFile, suffix: str) -> Path:
        """A file in the folder of what later runs need, of a file of the source."""
        return self.folder / disk.WORK / f"{file.name}.{suffix}"


def parts_of(
    file: SourceFile, names: Collection[str], pieces: Pieces, counts: Counts
) -> Iterator[range | tuple[TensorEntry, Piece]]:
    """The parts of a weight file, in the order of its bytes.

    Args:
        file: of the source.
        names: of the tensors that are rewritten.
        pieces: which of their elements are kept.
        counts: gets how many elements of a tensor were pruned, and how many were zero before.

    Yields:
        Bytes that stay as they are, or a tensor and a piece of it.
    """
    at = 0
    for entry in file.tensors:
        if entry.name not in names:
            continue
        if at < entry.start:
            yield range(at, entry.start)
        for first, bits, keep in pieces(entry):
            size = len(bits)
            counts["pruned"][entry.name] += size - int(np.count_nonzero(keep))
            counts["zero"][entry.name] += size - int(np.count_nonzero(bits << 1))
            yield entry, (first, bits, keep)
        at = entry.stop
    if at < file.size:
        yield range(at, file.size)


def add_checksum(counts: Counts, name: str, bits: np.ndarray) -> None:
    """Add what stands in the place of a piece to the checksum of its tensor."""
    counts["crc32"][name] = zlib.crc32(bits.data.cast("B"), counts["crc32"][name])


def check_unchanged(files: Iterable[SourceFile]) -> None:
    """Raise CheckpointError if files have changed since they were opened."""
    for file in files:
        with contextlib.suppress(OSError):
            info = os.stat(file.path)
            if (info.st_size, info.st_mtime_ns) == (file.size, file.mtime_ns):
                continue
        raise errors.CheckpointError(
            f"{file.path} has changed since it was opened, or is gone; expected files that stay as "
            "they are."
        )
