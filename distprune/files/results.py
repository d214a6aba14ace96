"""Make a result file by file, on any number of ranks; a run that was stopped can be resumed.

The ranks share the files, the largest first. A file has its name once it is finished, so that a
later run makes those that are missing. What a file holds depends on the task alone: the bytes of
the result depend neither on interruptions nor on the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import os
import platform
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from distprune.base.mask_bits import num_bytes_of
from distprune.base.memory import peak_rss_bytes
from distprune.files.checkpoints.checkpoint import SIDECAR, Checkpoint, OtherFile, SourceFile
from distprune.files.checkpoints.header import TensorEntry, WeightFile
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskLayout, mask_layout
from distprune.files.disk.access import (
    copy_range,
    new_file,
    read_into,
    write_all,
    write_atomically,
)
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    NaNError,
    RanksError,
    SelectionError,
)
from distprune.files.output import (
    DISCARD_HINT,
    WORK,
    begin,
    check_free_bytes,
    check_place,
    check_taken,
    finished_report,
    has_files,
    locked,
    put,
)
from distprune.files.planning import Plan
from distprune.files.reports import REPORT_FILE, Record, RunFacts
from distprune.files.rewriting import Counts, MaskWriter, Piece, Pieces, entries_of, parts_of
from distprune.files.scoring import KeptValues
from distprune.files.team import Team
from distprune.files.text import format_size

RECIPE_FILE = f"{SIDECAR}/recipe.yaml"


@dataclass(frozen=True)
class Task:
    """A result to make.

    Attributes:
        checkpoint: the source.
        digest: of everything that decides the result.
        tensors: those that are rewritten.
        layout: of the mask file; None: there is none.
        copied: files without weights that are copied.
        values: of kept elements, in place of those of the source.
        replaces: whether it takes the place of a finished result at its destination.
        inputs: other files that it is made from; none may be in a result that is replaced.
    """

    checkpoint: Checkpoint
    digest: str
    tensors: Sequence[TensorEntry]
    layout: MaskLayout | None
    copied: Sequence[OtherFile]
    values: KeptValues | None = None
    replaces: bool = False
    inputs: Sequence[str] = ()

    @cached_property
    def files(self) -> dict[str, SourceFile]:
        """The files that are made of one of the source, by name."""
        sources: list[SourceFile] = [*self.checkpoint.files, *self.copied]
        return {file.name: file for file in sources}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Of the tensors that are rewritten, by name."""
        return {entry.name: position for position, entry in enumerate(self.tensors)}

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all files, without the masks."""
        return sum(file.size for file in self.files.values())


def prune_task(plan: Plan, *, replaces: bool = False) -> Task:
    """The files of the result of a plan."""
    entries, inputs = [tensor.entry for tensor in plan.tensors], plan.inputs
    shapes = {entry.name: entry.shape for entry in entries}
    given = () if inputs.given is None else inputs.given.checkpoint.files
    return Task(
        checkpoint=plan.checkpoint,
        digest=plan.digest,
        tensors=entries,
        layout=mask_layout(shapes, plan.checkpoint.files) if plan.recipe.masks else None,
        copied=plan.copied,
        values=inputs.values,
        replaces=replaces,
        inputs=[
            *([] if plan.recipe.statistics is None else [plan.recipe.statistics]),
            *(file.path for file in given),
        ],
    )


# The report and the recipe as texts, and other small files by name.
Completed = tuple[bytes, bytes, Mapping[str, bytes | Iterable[bytes]]]
Complete = Callable[[Sequence[Record], RunFacts], Completed]


def make_result(
    team: Team,
    task: Task,
    destination: Path,
    rank: Callable[[], Pieces],
    complete: Complete,
    tell: Callable[[str], None] | None = None,
) -> str:
    """Make a result, or go on where an earlier run was stopped. Collective.

    Args:
        team: the ranks that share the work.
        task: to carry out.
        destination: absolute.
        rank: called first; returns which elements of the task's tensors are kept. Collective.
        complete: called at the end, on the leader.
        tell: called with sentences for the user.

    Returns:
        The text of the report.

    Raises:
        FilesError: of any kind, on every rank. Finished files stay for the next run, unless it
            would fail again.
    """
    tell = tell or (lambda text: None)
    folder = destination.with_name(f"{destination.name}.partial")
    with contextlib.ExitStack() as lock:
        text, done = team.from_leader(_start, task, destination, folder, lock)
        if text is not None:
            tell(f"{destination} is finished: this command made it before. Nothing was changed.")
            return str(text)
        if done:
            num_done = sum(task.files[name].size for name in done)
            sizes = f"{format_size(num_done)} of {format_size(task.num_bytes)}"
            tell(f"Resuming: {sizes} are finished.")
        try:
            seconds = _make_files(team, task, folder, done, rank)
            facts = RunFacts(
                num_ranks=team.size,
                seconds=seconds,
                peak_rss_bytes=team.share(peak_rss_bytes()),
                num_bytes=task.num_bytes,
                versions=versions(),
            )
            return team.from_leader(_publish, task, destination, folder, complete, facts)
        except RanksError:
            raise
        except FilesError as error:
            team.attempt(lambda: None)  # wait until every rank has closed its files
            would_fail_again = isinstance(error, (NaNError, SelectionError))
            if team.is_leader and (would_fail_again or not has_files(folder)):
                shutil.rmtree(folder, ignore_errors=True)
            if would_fail_again or not folder.is_dir():
                raise
            hint = f"run the same command again to resume, or {DISCARD_HINT}."
            raise type(error)(f"{error} {folder} keeps the finished files: {hint}") from error


def _start(
    task: Task, destination: Path, folder: Path, lock: contextlib.ExitStack
) -> tuple[str | None, list[str]]:
    """Lock the destination; the report if it is finished, and the names of finished files."""
    check_place(task.checkpoint.root, destination)
    lock.enter_context(locked(destination))
    report = finished_report(destination)
    if report is not None and report["digest"] == task.digest:
        sizes = {name: file.size for name, file in task.files.items()}
        with contextlib.suppress(OSError):
            if sizes == {name: os.stat(destination / name).st_size for name in sizes}:
                return (destination / REPORT_FILE).read_text(), []
    inputs = [file.path for file in task.checkpoint.all_files]
    check_taken(destination, replaces=task.replaces, inputs=[*inputs, *task.inputs])
    missing = sum(file.size for name, file in task.files.items() if not (folder / name).exists())
    check_free_bytes(destination.parent, missing, destination)
    begin(folder, task.digest)
    return None, [name for name in task.files if (folder / name).exists()]


def _make_files(
    team: Team, task: Task, folder: Path, done: Collection[str], rank: Callable[[], Pieces]
) -> dict[str, float]:
    """Make the files that are missing; the seconds that each phase took."""
    began = time.monotonic()
    pieces = rank()
    ranked = time.monotonic()
    missing = {name: file.size for name, file in task.files.items() if name not in done}
    team.begin("write", task.num_bytes, task.num_bytes - sum(missing.values()))
    steps = _write(task, folder, names_by_rank(missing, team.size)[team.index], pieces)
    with contextlib.closing(steps):  # what it has begun is removed if another rank fails
        team.work(steps)
    return {"count": round(ranked - began, 3), "write": round(time.monotonic() - ranked, 3)}


def _publish(
    task: Task, destination: Path, folder: Path, complete: Complete, facts: RunFacts
) -> str:
    """Write the last files and rename the folder; the report."""
    check_unchanged(task.checkpoint.folder, task.checkpoint.all_files)
    numbers = range(len(task.checkpoint.files))
    records = [json.loads(_work(folder, number, "json").read_text()) for number in numbers]
    report, recipe, others = complete(records, facts)
    if task.layout is not None:
        _join_masks(task, folder, task.layout)
    for name, data in [*others.items(), (RECIPE_FILE, recipe), (REPORT_FILE, report)]:
        write_atomically(folder / name, data)
    inputs = [file.path for file in task.checkpoint.all_files]
    check_taken(destination, replaces=task.replaces, inputs=[*inputs, *task.inputs])
    (folder / WORK / "digest").unlink()  # without it, a later run begins anew
    shutil.rmtree(folder / WORK)
    put(folder, destination, replaces=task.replaces)
    return report.decode()


def _write(
    task: Task, folder: Path, names: Iterable[str], pieces: Pieces
) -> Generator[int, None, None]:
    """Make some files; yields numbers of bytes."""
    numbers = {file.name: number for number, file in enumerate(task.checkpoint.files)}
    kept = {} if task.values is None else entries_of(task.values, task.tensors)
    for name in names:
        file = task.files[name]
        with new_file(folder / name, file.mode) as output:
            if not isinstance(file, WeightFile):
                yield from copy_range(file.path, 0, file.size, output)
                continue
            counts = Counts(Counter)
            with new_file(_work(folder, numbers[name], "masks")) as masks:
                writer = None if task.layout is None else MaskWriter(masks)
                for part in parts_of(file, task.positions, pieces, counts):
                    if isinstance(part, range):
                        yield from copy_range(file.path, part.start, part.stop, output)
                    else:
                        yield _write_piece(task, *part, counts, kept, output, writer)
            write_atomically(_work(folder, numbers[name], "json"), json.dumps(counts).encode())


def _write_piece(
    task: Task,
    position: int,
    piece: Piece,
    counts: Counts,
    kept: Mapping[str, TensorEntry],
    output: int,
    masks: MaskWriter | None,
) -> int:
    """Write a piece of a tensor, and of its mask; the number of bytes."""
    first, bits, keep = piece
    entry = task.tensors[position]
    own = kept.get(entry.name)
    if own is not None:
        read_into(own.path, own.start + first * bits.itemsize, bits.data.cast("B"))
    np.multiply(bits, keep, out=bits)  # pruned bits are 0, so +0 whatever the sign was
    if own is not None:
        note_values(counts, position, bits)
    write_all(output, bits.data)
    if masks is not None:
        masks.add(keep, is_last=first + len(keep) == entry.numel)
    return bits.nbytes


def _join_masks(task: Task, folder: Path, layout: MaskLayout) -> None:
    """Join the masks of all weight files."""
    places: dict[str, tuple[int, int]] = {}
    for number, file in enumerate(task.checkpoint.files):
        start = 0
        for entry in file.tensors:
            if entry.name in task.positions:
                places[entry.name] = number, start
                start += num_bytes_of(entry.numel)
    modes = (file.mode for file in task.checkpoint.files)
    mode = functools.reduce(operator.and_, modes, 0o666)
    with new_file(folder / MASK_FILE, mode) as output:
        write_all(output, layout.header)
        for name, shape in layout.shapes.items():
            number, start = places[name]
            stop = start + num_bytes_of(math.prod(shape))
            for _ in copy_range(str(_work(folder, number, "masks")), start, stop, output):
                pass


def _work(folder: Path, number: int, suffix: str) -> Path:
    """A file in the folder of what later runs need, of a weight file."""
    return folder / WORK / f"{number:05}.{suffix}"


def names_by_rank(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Share files among ranks: the largest first, each for the rank that has the fewest bytes."""
    names: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        names[rank].append(name)
        loads[rank] += sizes[name]
    return names


def note_values(counts: Counts, position: int, bits: np.ndarray) -> None:
    """Add what stands in the place of a piece to the checksum of its tensor."""
    of_values = counts["values"]
    of_values[position] = zlib.crc32(bits.data.cast("B"), of_values[position])


def check_unchanged(folder: str, files: Iterable[SourceFile]) -> None:
    """Raise CheckpointError if files of the source have changed since the source was opened.

    Args:
        folder: the source, for the message.
        files: of the source; their sizes and times are compared with those on the disk.
    """
    changed = []
    for file in files:
        try:
            info = os.stat(file.path)
        except OSError:
            changed.append(f"{file.name} is gone.")
            continue
        if (info.st_size, info.st_mtime_ns) != (file.size, file.mtime_ns):
            changed.append(f"{file.name} has changed.")
    if changed:
        raise CheckpointError(
            f"{folder} has changed since it was opened; expected a source that stays as it is:",
            changed,
        )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
