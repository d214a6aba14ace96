"""``verify``: rank the source of a pruned checkpoint again, and compare the result with it.

The recipe in the report says how, with the statistics beside it if the scores are made from some.
Masks, pruned and kept elements, and all copied files are compared tensor by tensor and file by
file. Of kept weights that an update has moved, the report has checksums.

[Note: rounds] The last of several rounds ranked what the round before left, which is gone: nothing
tells whether these are the lowest scores. There the masks of the result say what is pruned, and
everything else is compared.

 plan --> find_cuts --cuts--> all ranks read source, result and masks --> what differs
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distprune.base.memory import Array
from distprune.files.checkpoints.checkpoint import SourceFile
from distprune.files.checkpoints.header import WeightFile
from distprune.files.checkpoints.mask_files import (
    MASK_FILE,
    MaskFile,
    read_keep,
)
from distprune.files.cuts import find_cuts
from distprune.files.disk.access import read_into
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    NaNError,
    SelectionError,
)
from distprune.files.lowest import LowestElements
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan, plan
from distprune.files.reading import Source
from distprune.files.reports import REPORT_FILE, identity_of, read_report, recipe_of
from distprune.files.results import (
    RECIPE_FILE,
    check_unchanged,
    names_by_rank,
    note_values,
    prune_task,
)
from distprune.files.rewriting import Counts, Piece, Pieces, masked_pieces, parts_of
from distprune.files.scoring import KeptValues
from distprune.files.team import Progress, Team
from distprune.files.text import printable
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.recipes import Recipe

_COPIED = 8 << 20  # bytes that are compared at a time


@dataclass(frozen=True)
class VerifyReport:
    """The result of a comparison.

    Attributes:
        problems: everything that is wrong; empty if the result is what the recipe asks for.
        num_bytes: how many bytes of the source were compared.
        num_elements: how many elements the selected tensors have.
        num_pruned: how many of these elements are pruned, according to the masks.
        has_order: whether the order of scores was compared; False: it was pruned in rounds, and
            what the last one ranked is gone.
    """

    problems: tuple[str, ...]
    num_bytes: int
    num_elements: int
    num_pruned: int
    has_order: bool = True

    @property
    def is_good(self) -> bool:
        return not self.problems


def verify(
    destination: str | Path,
    source: str | Path,
    *,
    scores: str | Path | None = None,
    communicator: Communicator | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """Check a pruned checkpoint against its source.

    The destination has to have the files that :func:`prune` writes, in full, and no others. Every
    mask has to be the one that the recipe leads to, ties included; every byte outside of the pruned
    elements has to be that of the source, and every pruned element +0. What the report and the
    model card say is not judged. Of a pruning in rounds the order of scores is not compared; see
    [Note: rounds].

    Args:
        destination: a folder that :func:`prune` wrote, with masks; visible to every rank.
        source: the checkpoint that it was made from, or a copy of it.
        scores: the scores that it was ranked by, or a copy of them, if they were given.
        communicator: of the ranks that share the work; by default of the default process group,
            or this process alone if there is none.
        progress: called about twice a second, with what all ranks have done.

    Returns:
        The report, the same on every rank, whatever their number.

    Raises:
        CheckpointError: a folder cannot be read, the destination has no masks or no report, or it
            was made from another source.
        RanksError: the ranks were called with different folders, or one was lost.
        Each is raised on every rank that is left.

    Cost: the reads that :func:`prune` needs to rank the source, and one read of source, result and
    masks; memory as for pruning. Communication as for pruning.
    """
    team = Team(communicator or world(), progress)
    result: _Result = team.attempt(_Result, Path(destination), source, scores)
    plan, checkpoint = result.plan, result.plan.checkpoint
    target = ascii(os.path.abspath(destination))
    team.compare([("destination", target), ("plan", plan.digest)])
    read = Source(plan, team.count)
    pieces = masked_pieces(result.entries, result.masks)
    try:
        sizes = {n: f.size for n, f in result.task.files.items() if result.is_readable(n)}
        if result.has_order:
            pieces = LowestElements(read, find_cuts(team, read)).pieces
        team.begin("verify", sum(sizes.values()))
        mine = names_by_rank(sizes, team.size)[team.index]
        team.work(result.compare(mine, pieces))
        found = [[*key, *what] for key, what in result.found.items()]
        shared = [result.num_bytes, result.num_pruned, found, list(result.checksums.items())]
        result.merge(team.share(shared))
        team.attempt(check_unchanged, checkpoint.folder, checkpoint.all_files)
    except (NaNError, SelectionError) as error:
        raise _misfit(destination, source, error) from error
    num_pruned = result.num_pruned
    return VerifyReport(
        tuple(result.all_problems()),
        result.num_bytes,
        plan.num_elements,
        num_pruned,
        result.has_order,
    )


class _Result:
    """A result beside what it has to be: files, bytes, masks and zeros.

    Attributes:
        plan: derived from the source.
        task: whose result it is.
        entries: the tensors that are pruned.
        masks: of the result.
        num_bytes: how many bytes of the source were compared.
        num_pruned: how many elements are pruned, according to the masks.
        found: by (what is wrong, tensor or file): how often, and the first element or byte.
        checksums: of moved weights, by position.
    """

    def __init__(self, folder: Path, source: str | Path, scores: str | Path | None) -> None:
        self.folder = folder
        _check_folder(folder)
        self.report = read_report(folder)
        recipe = recipe_of(self.report, str(folder))
        if not recipe.masks:
            raise CheckpointError(
                f"{folder} was pruned without masks (masks: false); verify needs them. Prune again "
                "with masks, and compare the two results with `distprune diff`."
            )
        try:
            located = _located(recipe, folder, scores)
            update = (self.report.inputs or {}).get("update")
            values = None if update is None else KeptValues.from_json(update)
            self.has_order = values is None or not values.facts.get("rounds")
            self.plan: Plan = plan(source, located, values=values)
        except SelectionError as error:
            raise _misfit(folder, source, error) from error
        checkpoint = self.plan.checkpoint
        self.task = task = prune_task(self.plan)
        layout, self.entries = task.layout, task.tensors
        assert layout is not None  # the recipe has masks
        self.masks = MaskFile(str(folder / MASK_FILE), layout.shapes, {}, layout.starts)
        self.num_bytes = self.num_pruned = 0
        self.found: dict[tuple[str, str], tuple[int, int]] = {}
        self.checksums: dict[int, int] = {}
        self._updated = frozenset[str]() if values is None else values.names
        # What is wrong with files, and the names of those whose content cannot be compared.
        small = [REPORT_FILE, RECIPE_FILE, *([CARD_FILE] if self.plan.has_card else [])]
        small += [STATISTICS_FILE] if self.plan.inputs.statistics is not None else []
        sizes: dict[str, int | None] = {name: file.size for name, file in task.files.items()}
        sizes |= {MASK_FILE: layout.size, **dict.fromkeys(small)}
        self.problems, self.bad = _look_through(folder, sizes)
        self.has_expected_masks = MASK_FILE not in self.bad
        if self.has_expected_masks:
            with open(folder / MASK_FILE, "rb") as file:
                header = file.read(len(layout.header))
            self.has_expected_masks = header == layout.header
        expected = identity_of(checkpoint).items()
        is_same = all(self.report.source.get(name) == identity for name, identity in expected)
        if not self.has_expected_masks and not is_same:
            raise CheckpointError(
                f"{folder} was not made from {source}: the sizes or headers of the weight files "
                "were others."
            )

    def is_readable(self, name: str) -> bool:
        """Whether a file can be compared."""
        file = self.task.files[name]
        is_pruned = isinstance(file, WeightFile) and any(
            entry.name in self.task.positions for entry in file.tensors
        )
        return name not in self.bad and (self.has_expected_masks or not is_pruned)

    def compare(self, names: Iterable[str], pieces: Pieces) -> Iterator[int]:
        """Compare some files with what ``prune`` makes of the source; yields bytes."""
        for name in names:
            file, counts = self.task.files[name], Counts(Counter)
            if not isinstance(file, WeightFile):
                yield from self._compare_copy(file, range(file.size))
                continue
            for part in parts_of(file, self.task.positions, pieces, counts):
                if isinstance(part, range):
                    yield from self._compare_copy(file, part)
                else:
                    self._compare_piece(*part, counts)
                    yield part[1].bits.nbytes
            self.checksums |= counts["values"]

    def _compare_piece(self, position: int, piece: Piece, counts: Counts) -> None:
        """The mask is that of the recipe; the result is the source times the mask, with +0.

        No bits are set after the last element of a mask.
        """
        entry, (first, bits, keep) = self.entries[position], piece
        kept = read_keep(self.masks, entry.name, first, first + len(bits))
        written: Array = np.empty_like(bits)
        start = entry.start + first * bits.itemsize
        read_into(str(self.folder / entry.file), start, written.data.cast("B"))
        if entry.name in self._updated:  # the report has a checksum of what was kept
            bits = written
            note_values(counts, position, written)
        self._note("wrong", entry.name, written != bits * kept, first)
        self._note("misplaced", entry.name, kept != keep, first)
        self.num_pruned += len(kept) - int(np.count_nonzero(kept))
        self.num_bytes += bits.nbytes
        last = first + len(bits)
        if last == entry.numel and last % 8:
            tail = read_keep(self.masks, entry.name, last, -(-last // 8) * 8)
            self._note("tail", entry.name, tail, last)

    def _compare_copy(self, file: SourceFile, part: range) -> Iterator[int]:
        """Read bytes that have to be equal; yields numbers of bytes."""
        path = str(self.folder / file.name)
        for start in range(part.start, part.stop, _COPIED):
            size = min(_COPIED, part.stop - start)
            expected, written = (np.empty(size, dtype=np.uint8) for _ in range(2))
            read_into(file.path, start, expected.data)
            read_into(path, start, written.data)
            self._note("copy", file.name, written != expected, start)
            self.num_bytes += size
            yield size

    def _note(self, what: str, where: str, are_wrong: Array, first: int) -> None:
        places = np.flatnonzero(are_wrong)
        if len(places):
            self._add((what, where), len(places), first + int(places[0]))

    def _add(self, key: tuple[str, str], count: int, first: int) -> None:
        num_before, first_before = self.found.get(key, (0, first))
        self.found[key] = num_before + count, min(first, first_before)

    def merge(self, of_ranks: Iterable[list[Any]]) -> None:
        """Take together what all ranks have found."""
        self.num_bytes = self.num_pruned = 0
        self.found.clear()
        for num_bytes, num_pruned, found, checksums in of_ranks:
            self.num_bytes += num_bytes
            self.num_pruned += num_pruned
            self.checksums |= dict(checksums)
            for what, where, count, first in found:
                self._add((what, where), count, first)

    def all_problems(self) -> list[str]:
        """Everything that is wrong, in an order that does not depend on the ranks."""
        problems = list(self.problems)
        if MASK_FILE not in self.bad and not self.has_expected_masks:
            problems.append(
                f"{MASK_FILE}: its header is not the one that prune writes for these tensors."
            )
        keys = sorted(key for key in self.found if key[0] == "copy")
        keys += [(w, e.name) for e in self.entries for w in ("wrong", "tail", "misplaced")]
        problems += [
            f"{printable(key[1])}: {_described(key[0], *self.found[key])}"
            for key in keys
            if key in self.found
        ]
        if not all(self.is_readable(entry.file) for entry in self.entries):
            return problems
        stored = dict(self.report.checksums or ())
        problems += [
            f"{printable(entry.name)}: its kept weights are not those that were written."
            for position, entry in enumerate(self.entries)
            if stored.get(position) != self.checksums.get(position)
        ]
        if self.num_pruned != self.plan.num_to_prune:
            problems.append(
                f"{self.num_pruned} elements are pruned in all; the recipe asks for "
                f"{self.plan.num_to_prune}."
            )
        return problems


def _described(what: str, count: int, first: int) -> str:
    if what == "copy":
        more = f"; so do {count - 1} more" if count > 1 else ""
        return f"byte {first} differs from the source, and belongs to no pruned tensor{more}."
    if what == "tail":
        return "the last byte of its mask has bits that belong to no element."
    problem = "are pruned or kept against the order of scores"
    if what == "wrong":
        problem = "are neither kept as they were nor pruned as the mask says"
    return f"{count} elements {problem}; the first is number {first}."


def _look_through(
    folder: Path, sizes: Mapping[str, int | None]
) -> tuple[list[str], frozenset[str]]:
    """Compare the names and sizes of all files in a folder with those that are expected.

    Links to files are read through, and so are links to folders in which a file is expected.
    No file is opened that is not a regular one.

    Returns:
        A sentence for each file that is missing, unexpected or unreadable, or has another size, in
        the order of names; and the names of expected files whose content cannot be compared.
    """
    problems: dict[str, str] = {}
    for name, size in sizes.items():
        if problem := _file_problem(folder / name, size):
            problems[name] = f"{printable(name)} {problem}"
    bad = frozenset(problems)
    parents = {str(parent) for name in sizes for parent in Path(name).parents}
    for parent in parents:
        try:
            entries = os.listdir(folder / parent)
        except FileNotFoundError:
            continue  # so its files are missing
        except OSError as error:
            shown = folder if parent == "." else printable(parent)
            problems[parent] = f"{shown} cannot be listed: {error.strerror}."
            continue
        for entry in entries:
            name = os.path.normpath(os.path.join(parent, entry))
            if name not in sizes and name not in parents:
                path = folder / name
                what = "folder" if os.path.isdir(path) and not path.is_symlink() else "file"
                problems[name] = f"{printable(name)} is a {what} that prune did not write."
    return [problems[name] for name in sorted(problems)], bad


def _file_problem(path: Path, size: int | None) -> str:
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            return "is not a regular file."
        if size is not None and info.st_size != size:
            return f"has {info.st_size} bytes; expected {size}."
        with open(path, "rb"):
            return ""
    except FileNotFoundError:
        return "is missing."
    except OSError as error:
        return f"cannot be read: {error.strerror}."


def _located(recipe: Recipe, folder: Path, scores: str | Path | None) -> Recipe:
    """The recipe of a result with the paths of what its scores were made from."""
    if recipe.statistics is not None:
        recipe = recipe.model_copy(update={"statistics": str(folder / STATISTICS_FILE)})
    if recipe.scores is None and scores is None:
        return recipe
    if recipe.scores is None:
        raise CheckpointError(f"{folder} was not ranked by given scores; leave --scores out.")
    if scores is None:
        raise CheckpointError(
            f"{folder} was ranked by scores of single weights, which it does not hold; expected "
            "them, or a copy of them (--scores FOLDER). `distprune prune --text` keeps those that "
            "it makes with --keep-scores."
        )
    return recipe.model_copy(update={"scores": str(scores)})


def _misfit(folder: str | Path, source: str | Path, error: FilesError) -> CheckpointError:
    return CheckpointError(f"the recipe in {folder}/{REPORT_FILE} does not fit {source}: {error}")


def _check_folder(folder: Path) -> None:
    """Raise CheckpointError, and say what is missing, if prune did not write this folder."""
    if not os.path.isdir(folder):
        state = "is a file" if os.path.exists(folder) else "does not exist"
        raise CheckpointError(f"{folder} {state}; expected a folder that distprune pruned.")
    has_masks, has_report = (os.path.exists(folder / n) for n in (MASK_FILE, REPORT_FILE))
    if has_masks and not has_report:
        raise CheckpointError(
            f"{folder} was not made by `distprune prune`: it has masks, but no report "
            f"({REPORT_FILE} is missing). Masks that come from elsewhere have no order to be "
            "compared with; use `distprune diff` to compare the weights."
        )
