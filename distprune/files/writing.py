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
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from distprune.base import mask_bits
from distprune.base.mask_bits import num_bytes_of
from distprune.base.memory import Array, peak_rss_bytes
from distprune.files.checkpoint import (
    SIDECAR,
    Checkpoint,
    OtherFile,
    SourceFile,
    TensorEntry,
    WeightFile,
    read_header,
)
from distprune.files.disk import copy_range, new_file, read_into, write_all, write_atomically
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    NaNError,
    RanksError,
    SelectionError,
)
from distprune.files.mask_files import MASK_FILE, MaskFile, mask_layout
from distprune.files.output import (
    DISCARD_HINT,
    REPORT_FILE,
    WORK,
    begin,
    check_destination,
    check_free_bytes,
    check_outside,
    finished_report,
    has_files,
    locked,
    publish,
)
from distprune.files.planning import KeptValues
from distprune.files.ranked import Counts, Piece, Pieces
from distprune.files.reports import Record, RunFacts
from distprune.files.team import Team
from distprune.files.text import format_size

RECIPE_FILE = f"{SIDECAR}/recipe.yaml"

# Makes the small files of a result, by name, the report among them.
Complete = Callable[[Sequence[Record], RunFacts], Mapping[str, bytes]]


@dataclass(frozen=True)
class Task:
    """A result to make.

    Attributes:
        checkpoint: the source.
        digest: of everything that decides the result.
        tensors: those that are rewritten.
        copied: files without weights that are copied.
        has_masks: whether the masks are written.
        values: of kept elements, in place of those of the source.
        replaces: whether it takes the place of a finished result at its destination.
        inputs: other files that it is made from; none may be in a result that is replaced.
    """

    checkpoint: Checkpoint
    digest: str
    tensors: Sequence[TensorEntry]
    copied: Sequence[OtherFile]
    has_masks: bool = True
    values: KeptValues | None = None
    replaces: bool = False
    inputs: Sequence[str] = ()

    @cached_property
    def files(self) -> dict[str, SourceFile]:
        """The files that are made of one of the source, by name."""
        files: list[SourceFile] = [*self.checkpoint.files, *self.copied]
        return {file.name: file for file in files}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Of the tensors that are rewritten, by name."""
        return {entry.name: position for position, entry in enumerate(self.tensors)}

    @cached_property
    def masks(self) -> MaskFile:
        """Of the tensors that are rewritten."""
        shapes = {entry.name: entry.shape for entry in self.tensors}
        return mask_layout(shapes, self.checkpoint.files)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all files, without the masks."""
        return sum(file.size for file in self.files.values())

    def parts(
        self, file: WeightFile, pieces: Pieces, counts: Counts
    ) -> Iterator[range | tuple[int, Piece]]:
        """The parts of a weight file, in the order of its bytes.

        Args:
            file: of the source.
            pieces: which elements of its tensors are kept.
            counts: gets how many elements of a tensor were pruned, and how many were zero before.

        Yields:
            Bytes that stay as they are, or the position of a tensor and a piece of it.
        """
        at = 0
        for entry in file.tensors:
            position = self.positions.get(entry.name)
            if position is None:
                continue
            if at < entry.start:
                yield range(at, entry.start)
            counts["pruned"][position] += 0
            for piece in pieces(position, counts):
                counts["pruned"][position] += len(piece.keep) - int(np.count_nonzero(piece.keep))
                num_zero = len(piece.bits) - int(np.count_nonzero(piece.bits << 1))
                if num_zero:
                    counts["zero"][position] += num_zero
                yield position, piece
            at = entry.stop
        if at < file.size:
            yield range(at, file.size)


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
        text, done = team.from_leader(lambda: _start(task, destination, folder, lock))
        if text is not None:
            tell(f"{destination} is finished: this command made it before. Nothing was changed.")
            return str(text)
        num_done = sum(task.files[name].size for name in done)
        if done:
            sizes = f"{format_size(num_done)} of {format_size(task.num_bytes)}"
            tell(f"Resuming: {sizes} are finished.")
        try:
            times = [time.monotonic()]
            pieces = rank()
            times.append(time.monotonic())
            missing = {name: file.size for name, file in task.files.items() if name not in done}
            team.begin("write", task.num_bytes, num_done)
            steps = _write(task, folder, names_by_rank(missing, team.size)[team.index], pieces)
            with contextlib.closing(steps):  # what it has begun is removed if another rank fails
                team.work(steps)
            times.append(time.monotonic())
            facts = RunFacts(
                num_ranks=team.size,
                seconds={
                    "count": round(times[1] - times[0], 3),
                    "write": round(times[2] - times[1], 3),
                },
                peak_rss_bytes=team.share(peak_rss_bytes()),
                num_bytes=task.num_bytes,
                versions=versions(),
            )
            return team.from_leader(lambda: _publish(task, destination, folder, complete, facts))
        except RanksError:
            raise
        except FilesError as error:
            team.agree()  # wait until every rank has closed its files
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
    check_outside(destination, task.checkpoint)
    lock.enter_context(locked(destination))
    report = finished_report(destination)
    if report is not None and report["digest"] == task.digest:
        sizes = {name: file.size for name, file in task.files.items()}
        with contextlib.suppress(OSError):
            if sizes == {name: os.stat(destination / name).st_size for name in sizes}:
                return (destination / REPORT_FILE).read_text(), []
    check_destination(destination, task.checkpoint, replaces=task.replaces, inputs=task.inputs)
    done = [name for name in task.files if (folder / name).exists()]
    missing = task.num_bytes - sum(task.files[name].size for name in done)
    check_free_bytes(destination.parent, missing, destination)
    begin(folder, task.digest)
    return None, [name for name in done if (folder / name).exists()]


def _publish(
    task: Task, destination: Path, folder: Path, complete: Complete, facts: RunFacts
) -> str:
    """Write the last files and rename the folder; the report."""
    check_unchanged(task.checkpoint.folder, task.checkpoint.all_files)
    numbers = range(len(task.checkpoint.files))
    records = [json.loads(_work(folder, number, "json").read_text()) for number in numbers]
    small = complete(records, facts)
    if task.has_masks:
        _join_masks(task, folder)
    for name, data in small.items():
        write_atomically(folder / name, data)
    check_destination(destination, task.checkpoint, replaces=task.replaces, inputs=task.inputs)
    (folder / WORK / "digest").unlink()  # without it, a later run begins anew
    shutil.rmtree(folder / WORK)
    publish(folder, destination, replaces=task.replaces)
    return small[REPORT_FILE].decode()


def _write(
    task: Task, folder: Path, names: Iterable[str], pieces: Pieces
) -> Generator[int, None, None]:
    """Make some files; yields numbers of bytes."""
    numbers = {file.name: number for number, file in enumerate(task.checkpoint.files)}
    kept = {} if task.values is None else _entries_of(task.values, task.tensors)
    for name in names:
        file = task.files[name]
        with new_file(folder / name, file.mode) as output:
            if not isinstance(file, WeightFile):
                yield from copy_range(file.path, 0, file.size, output)
                continue
            counts = Counts(Counter)
            with new_file(_work(folder, numbers[name], "masks")) as masks:
                rest = np.empty(0, dtype=bool)  # of a mask: less than a byte
                for part in task.parts(file, pieces, counts):
                    if isinstance(part, range):
                        yield from copy_range(file.path, part.start, part.stop, output)
                        continue
                    position, (first, bits, keep) = part
                    entry = task.tensors[position]
                    if own := kept.get(entry.name):
                        start = own.start + first * bits.itemsize
                        read_into(own.path, start, bits.data.cast("B"))
                    np.multiply(bits, keep, out=bits)  # pruned bits are 0: +0 whatever the sign was
                    if own:
                        add_checksum(counts, position, bits)
                    write_all(output, bits.data)
                    is_last = first + len(keep) == entry.numel
                    keep = np.concatenate([rest, keep]) if len(rest) else keep
                    num_whole = len(keep) if is_last else len(keep) - len(keep) % 8
                    rest = keep[num_whole:].copy()
                    write_all(masks, mask_bits.pack(keep[:num_whole]).data)
                    yield bits.nbytes
            write_atomically(_work(folder, numbers[name], "json"), json.dumps(counts).encode())


def _entries_of(values: KeptValues, entries: Collection[TensorEntry]) -> dict[str, TensorEntry]:
    """By name of a tensor, the place of its kept values.

    Raises:
        CheckpointError: a tensor is missing, or has another dtype or shape than in the source.
    """
    assert values.folder is not None
    files = [read_header(path) for path in sorted(values.folder.glob("*.safetensors"))]
    found = {entry.name: entry for file in files for entry in file.tensors}
    for entry in entries:
        if entry.name in values.names:
            own = found.get(entry.name)
            if own is None or (own.dtype, own.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{values.folder} has not the kept values of {entry.name}; expected "
                    f"{entry.dtype} {list(entry.shape)}, as in the source."
                )
    return {name: own for name, own in found.items() if name in values.names}


def _join_masks(task: Task, folder: Path) -> None:
    """Join the masks of all weight files."""
    places: dict[str, tuple[int, int]] = {}
    for number, file in enumerate(task.checkpoint.files):
        start = 0
        for entry in file.tensors:
            if entry.name in task.positions:
                places[entry.name] = number, start
                start += num_bytes_of(entry.numel)
    mode = functools.reduce(operator.and_, (file.mode for file in task.checkpoint.files), 0o666)
    with new_file(folder / MASK_FILE, mode) as output:
        write_all(output, task.masks.header)
        for name, shape in task.masks.shapes.items():
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


def add_checksum(counts: Counts, position: int, bits: Array) -> None:
    """Add what stands in the place of a piece to the checksum of its tensor."""
    of_values = counts["values"]
    of_values[position] = zlib.crc32(bits.data.cast("B"), of_values[position])


def check_unchanged(folder: str, files: Iterable[SourceFile]) -> None:
    """Raise CheckpointError if files have changed since their folder was opened."""
    for file in files:
        try:
            info = os.stat(file.path)
            is_same = (info.st_size, info.st_mtime_ns) == (file.size, file.mtime_ns)
        except OSError:
            is_same = False
        if not is_same:
            raise CheckpointError(
                f"{file.name} of {folder} has changed since it was opened, or is gone; expected "
                "files that stay as they are."
            )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
