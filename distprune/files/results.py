"""Make a result file by file, on any number of ranks; a run that was stopped can be resumed.

The ranks share the files, the largest first. A file has its name once it is finished, so that a
later run makes those that are missing. What a file holds depends on the task alone: the bytes of
the result depend neither on interruptions nor on the number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import platform
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

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
from distprune.files.output import Output, check_place
from distprune.files.planning import Plan
from distprune.files.reports import REPORT_FILE, Record, RunFacts
from distprune.files.rewriting import Counts, MaskWriter, Pieces, entries_of, parts_of
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
            *(part.statistics for part in plan.recipe.parts if part.statistics is not None),
            *(file.path for file in given),
        ],
    )


# Returns the report and the recipe as texts, and other small files by name.
Complete = Callable[
    [Sequence[Record], RunFacts], tuple[bytes, bytes, Mapping[str, bytes | Iterable[bytes]]]
]


@contextlib.contextmanager
def resumed(
    team: Team,
    task: Task,
    destination: Path,
    *,
    bytes_to_prepare: int = 0,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Run]:
    """Start to make a result, or go on where an earlier run was stopped. Collective.

    Args:
        team: the ranks that share the work.
        task: to carry out.
        destination: absolute.
        bytes_to_prepare: that are read before the first file is written.
        tell: called with sentences for the user.

    Yields:
        The run. Its result appears by :meth:`Run.publish`; if that is not reached, the finished
        files stay for the next run.

    Raises:
        FilesError: of any kind, on every rank; its text says what is left on the disk.
    """
    sizes = {name: file.size for name, file in task.files.items()}
    inputs = [file.path for file in task.checkpoint.all_files]
    output = Output(
        destination, task.digest, sizes, replaces=task.replaces, inputs=[*inputs, *task.inputs]
    )
    run = Run(team, task, output, tell or (lambda text: None))
    try:
        run.start(bytes_to_prepare)
        yield run
    except FilesError as error:
        run.clear_up(error)
        raise
    finally:
        output.release()


@dataclass
class Run:
    """A result while it is made; see :func:`resumed`.

    Attributes:
        team, task, tell: as for :func:`resumed`.
        output: its folder.
        text: of the report, once the result is complete.
        prepared: what an earlier run kept for all files; None if there is nothing.
        done: the names of the files that earlier runs have finished.
        seconds: that each phase took.
    """

    team: Team
    task: Task
    output: Output
    tell: Callable[[str], None]
    text: str | None = None
    prepared: Any = None
    done: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def start(self, bytes_to_prepare: int) -> None:
        """Find what earlier runs have finished."""
        team, task = self.team, self.task

        def start() -> dict[str, Any]:
            check_place(task.checkpoint.root, self.output.destination)
            return self.output.start()

        state = team.from_leader(start)
        self.text = state["text"]
        if self.text is not None:
            self.tell(
                f"{self.output.destination} is finished: this command made it before. Nothing was "
                "changed."
            )
            return
        self.prepared, self.done = state["prepared"], state["done"]
        num_done = sum(task.files[name].size for name in self.done)
        if self.prepared is None:
            team.expect("count", bytes_to_prepare)
        team.expect("write", task.num_bytes, num_done)
        if self.done:
            self.tell(
                f"Resuming: {format_size(num_done)} of {format_size(task.num_bytes)} are finished."
            )

    def keep(self, value: Any) -> None:
        """Keep a JSON value that all files need for later runs. Collective."""
        self.team.from_leader(self.output.keep, value)

    def write(self, pieces: Pieces) -> None:
        """Make the files that are missing. Collective.

        Args:
            pieces: which elements of the task's tensors are kept.
        """
        team, task = self.team, self.task
        missing = {n: file.size for n, file in task.files.items() if n not in self.done}
        mine = names_by_rank(missing, team.size)[team.index]
        with self.timing("write"):
            team.begin("write", task.num_bytes, task.num_bytes - sum(missing.values()))
            steps = self._steps(mine, pieces)
            with contextlib.closing(steps):  # what it has begun is removed if another rank fails
                team.work(steps)

    def publish(self, complete: Complete) -> None:
        """Let the leader write the last files, and rename the folder. Collective."""
        facts = RunFacts(
            num_ranks=self.team.size,
            seconds=self.seconds,
            peak_rss_bytes=self.team.share(peak_rss_bytes()),
            num_bytes=self.task.num_bytes,
            versions=versions(),
        )

        def publish() -> str:
            task, folder = self.task, self.output.folder
            check_unchanged(task.checkpoint.folder, task.checkpoint.all_files)
            numbers = range(len(task.checkpoint.files))
            records = [json.loads(self._work(n, "json").read_text()) for n in numbers]
            report, recipe, others = complete(records, facts)
            for name, data in others.items():
                write_atomically(folder / name, data)
            if task.layout is not None:
                self._join_masks(task.layout)
            write_atomically(folder / RECIPE_FILE, recipe)
            write_atomically(folder / REPORT_FILE, report)
            self.output.publish()
            return report.decode()

        self.text = self.team.from_leader(publish)

    @contextlib.contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Measure a phase, for the report."""
        began = time.monotonic()
        yield
        self.seconds[phase] = round(time.monotonic() - began, 3)

    def clear_up(self, error: FilesError) -> None:
        """Remove what no run can use, and add to the error what is left."""
        is_lost = isinstance(error, RanksError)
        if not is_lost:  # wait until every rank has closed its files
            with contextlib.suppress(RanksError):
                self.team.check(None)
        if not self.team.is_leader:
            if is_lost and self.output.folder.is_dir():
                error.say_more(self.output.left())
            return
        if not self.output.is_open:
            return
        if isinstance(error, (NaNError, SelectionError)):  # the same task would fail again
            self.output.discard()
        elif not is_lost:
            self.output.discard(only_if_empty=True)
        error.say_more(self.output.left())

    def _steps(self, names: Iterable[str], pieces: Pieces) -> Generator[int, None, None]:
        """Make some files; yields numbers of bytes."""
        numbers = {file.name: number for number, file in enumerate(self.task.checkpoint.files)}
        values = self.task.values
        kept = {} if values is None else entries_of(values, self.task.tensors)
        for name in names:
            file = self.task.files[name]
            with new_file(self.output.folder / name, file.mode) as output:
                if isinstance(file, WeightFile):
                    yield from self._rewrite(numbers[name], file, output, pieces, kept)
                else:
                    yield from copy_range(file.path, 0, file.size, output)

    def _rewrite(
        self,
        number: int,
        file: WeightFile,
        output: int,
        pieces: Pieces,
        kept: Mapping[str, TensorEntry],
    ) -> Iterator[int]:
        """Write a weight file, its masks, and what was counted."""
        task, counts = self.task, Counts(Counter)
        with new_file(self._work(number, "masks")) as descriptor:
            masks = MaskWriter(descriptor)
            for part in parts_of(file, task.positions, pieces, counts):
                if isinstance(part, range):
                    yield from copy_range(file.path, part.start, part.stop, output)
                    continue
                position, (first, bits, keep) = part
                entry = task.tensors[position]
                if entry.name in kept:
                    own = kept[entry.name]
                    start = own.start + first * bits.itemsize
                    read_into(own.path, start, bits.data.cast("B"))
                np.multiply(bits, keep, out=bits)  # pruned bits are 0, so +0 whatever the sign was
                if entry.name in kept:
                    note_values(counts, position, bits)
                write_all(output, bits.data)
                if task.layout is not None:
                    masks.add(keep, is_last=first + len(keep) == entry.numel)
                yield bits.nbytes
        write_atomically(self._work(number, "json"), json.dumps(counts).encode())

    def _join_masks(self, layout: MaskLayout) -> None:
        """Join the masks of all weight files."""
        places: dict[str, tuple[int, int]] = {}
        for number, file in enumerate(self.task.checkpoint.files):
            start = 0
            for entry in file.tensors:
                if entry.name in self.task.positions:
                    places[entry.name] = number, start
                    start += num_bytes_of(entry.numel)
        modes = (file.mode for file in self.task.checkpoint.files)
        mode = functools.reduce(operator.and_, modes, 0o666)
        with new_file(self.output.folder / MASK_FILE, mode) as output:
            write_all(output, layout.header)
            for name, shape in layout.shapes.items():
                number, start = places[name]
                stop = start + num_bytes_of(int(np.prod(shape, dtype=np.int64)))
                for _ in copy_range(str(self._work(number, "masks")), start, stop, output):
                    pass

    def _work(self, number: int, suffix: str) -> Path:
        """A file in the folder of what later runs need, of a weight file."""
        return self.output.work / f"{number:05}.{suffix}"


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
