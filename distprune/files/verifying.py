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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distprune.base.memory import Array
from distprune.files.checkpoint import WeightFile
from distprune.files.disk import read_into, slabs
from distprune.files.errors import CheckpointError, NaNError, SelectionError
from distprune.files.mask_files import MASK_FILE, MaskFile, read_keep
from distprune.files.output import REPORT_FILE
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, KeptValues, Plan, plan
from distprune.files.pruning import masked_pieces, prune_task
from distprune.files.ranked import Counts, Piece, Pieces, RankedTensors
from distprune.files.reports import Report, identity_of, read_report, recipe_of
from distprune.files.team import Progress, Team
from distprune.files.text import printable
from distprune.files.writing import (
    RECIPE_FILE,
    Task,
    add_checksum,
    check_unchanged,
    names_by_rank,
)
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world
from distprune.recipes import Recipe


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
    team, folder = Team(communicator or world(), progress), Path(destination)
    report, made = team.run(lambda: _plan_again(folder, source, scores))
    task, checkpoint = prune_task(made), made.checkpoint
    masks = replace(task.masks, path=str(folder / MASK_FILE))
    team.compare([("destination", ascii(os.path.abspath(folder))), ("plan", made.digest)])
    problems, bad = team.run(lambda: _check_files(folder, made, task, report))
    update = made.inputs.values
    has_order = update is None or not update.facts.get("rounds")
    pieces = masked_pieces(task.tensors, masks)
    sizes = {name: file.size for name, file in task.files.items() if name not in bad}
    comparison = _Comparison(folder, task, masks, () if update is None else update.names)
    try:
        if has_order:
            ranked = RankedTensors(made, team)
            ranked.find_cuts()
            pieces = ranked.pieces
        team.begin("verify", sum(sizes.values()))
        team.work(comparison.run(names_by_rank(sizes, team.size)[team.index], pieces))
    except (NaNError, SelectionError) as error:
        raise _misfit(folder, source, error) from error
    of_ranks = team.share(comparison.result())
    team.run(lambda: check_unchanged(checkpoint.folder, checkpoint.all_files))
    num_bytes, num_pruned = (sum(found[i] for found in of_ranks) for i in (0, 1))
    problems += sorted(text for found in of_ranks for text in found[2])
    if not bad:
        checksums = dict(pair for found in of_ranks for pair in found[3])
        stored = dict(report.checksums or ())
        problems += [
            f"{printable(entry.name)}: its kept weights are not those that were written."
            for position, entry in enumerate(task.tensors)
            if stored.get(position) != checksums.get(position)
        ]
        if num_pruned != made.num_to_prune:
            text = f"{num_pruned} elements are pruned in all; the recipe asks for"
            problems.append(f"{text} {made.num_to_prune}.")
    return VerifyReport(tuple(problems), num_bytes, made.num_elements, num_pruned, has_order)


def _plan_again(folder: Path, source: str | Path, scores: str | Path | None) -> tuple[Report, Plan]:
    """The report of a result, and the plan that made it."""
    if (folder / MASK_FILE).exists() and not (folder / REPORT_FILE).exists():
        raise CheckpointError(
            f"{folder} was not made by `distprune prune`: it has masks, but no report "
            f"({REPORT_FILE} is missing). Masks that come from elsewhere have no order to be "
            "compared with; use `distprune diff` to compare the weights."
        )
    report = read_report(folder)
    recipe = recipe_of(report, folder)
    if not recipe.masks:
        raise CheckpointError(
            f"{folder} was pruned without masks (masks: false); verify needs them. Prune again "
            "with masks, and compare the two results with `distprune diff`."
        )
    update = (report.inputs or {}).get("update")
    values = None if update is None else KeptValues.from_json(update)
    try:
        return report, plan(source, _located(recipe, folder, scores), values=values)
    except SelectionError as error:
        raise _misfit(folder, source, error) from error


def _located(recipe: Recipe, folder: Path, scores: str | Path | None) -> Recipe:
    """The recipe of a result with the paths of what its scores were made from."""
    if recipe.statistics is not None:
        recipe = recipe.model_copy(update={"statistics": str(folder / STATISTICS_FILE)})
    if (recipe.scores is None) != (scores is None):
        was = "not ranked by given scores; leave --scores out"
        if scores is None:
            was = (
                "ranked by scores of single weights, which it does not hold; expected them, or a "
                "copy of them (--scores FOLDER). `distprune prune --text` keeps those that it "
                "makes with --keep-scores"
            )
        raise CheckpointError(f"{folder} was {was}.")
    return recipe if scores is None else recipe.model_copy(update={"scores": str(scores)})


def _misfit(folder: Path, source: str | Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"the recipe in {folder}/{REPORT_FILE} does not fit {source}: {error}")


def _check_files(
    folder: Path, plan: Plan, task: Task, report: Report
) -> tuple[list[str], set[str]]:
    """What is wrong with the names and sizes of files, and the files that cannot be compared.

    Raises:
        CheckpointError: the result was made from another source.
    """
    small = [REPORT_FILE, RECIPE_FILE, *([CARD_FILE] if plan.has_card else [])]
    small += [STATISTICS_FILE] if plan.inputs.statistics is not None else []
    sizes: dict[str, int | None] = {name: file.size for name, file in task.files.items()}
    sizes |= {MASK_FILE: task.masks.size, **dict.fromkeys(small)}
    found = {name: _file_problem(folder / name, size) for name, size in sizes.items()}
    if not found[MASK_FILE]:
        with open(folder / MASK_FILE, "rb") as file:
            if file.read(len(task.masks.header)) != task.masks.header:
                found[MASK_FILE] = "has another header than prune writes for these tensors"
    if found[MASK_FILE] and identity_of(plan.checkpoint) != report.source:
        raise CheckpointError(
            f"{folder} was not made from {plan.checkpoint.folder}: the sizes or headers of the "
            "weight files were others."
        )
    parents = {str(parent) for name in sizes for parent in Path(name).parents}
    for parent in parents:
        for entry in os.listdir(folder / parent) if os.path.isdir(folder / parent) else ():
            name = os.path.normpath(os.path.join(parent, entry))
            if name not in sizes and name not in parents:
                found[name] = "was not written by prune"
    problems = [f"{printable(name)} {text}." for name, text in sorted(found.items()) if text]
    bad = {name for name in task.files if found[name]}
    if found[MASK_FILE]:  # nothing says what the weights should be
        bad |= {entry.file for entry in task.tensors}
    return problems, bad


def _file_problem(path: Path, size: int | None) -> str:
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            return "is not a regular file"
        if size is not None and info.st_size != size:
            return f"has {info.st_size} bytes; expected {size}"
        with open(path, "rb"):
            return ""
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


class _Comparison:
    """Files of a result beside what they have to be.

    Args:
        folder: of the result.
        task: that makes it.
        masks: of the result.
        updated: the tensors whose kept weights were moved.
    """

    def __init__(self, folder: Path, task: Task, masks: MaskFile, updated: Iterable[str]) -> None:
        self._folder, self._task, self._masks = folder, task, masks
        self._updated = frozenset(updated)
        self._num_bytes = self._num_pruned = 0
        self._checksums: dict[int, int] = {}
        # By name and by what is wrong: how many elements or bytes, and the first of them.
        self._wrong: dict[tuple[str, str], tuple[int, int]] = {}

    def result(self) -> list[Any]:
        """Bytes that were compared, pruned elements, problems, and checksums of moved weights."""
        problems = [
            f"{printable(name)}: {count} {what}; the first is number {first}."
            for (name, what), (count, first) in self._wrong.items()
        ]
        return [self._num_bytes, self._num_pruned, problems, list(self._checksums.items())]

    def run(self, names: Iterable[str], pieces: Pieces) -> Iterator[int]:
        """Compare some files with what ``prune`` makes of the source; yields bytes."""
        for name in names:
            file, counts, path = self._task.files[name], Counts(Counter), str(self._folder / name)
            parts: Iterable[range | tuple[int, Piece]] = [range(file.size)]
            if isinstance(file, WeightFile):
                parts = self._task.parts(file, pieces, counts)
            for part in parts:
                if not isinstance(part, range):
                    yield self._compare_piece(path, *part, counts)
                    continue
                for run in slabs(len(part)):
                    start = part.start + run.start
                    expected, written = np.empty((2, len(run)), dtype=np.uint8)
                    read_into(file.path, start, expected.data)
                    read_into(path, start, written.data)
                    self._add(name, _COPIED, written != expected, start)
                    self._num_bytes += len(run)
                    yield len(run)
            self._checksums |= counts["values"]

    def _compare_piece(self, path: str, position: int, piece: Piece, counts: Counts) -> int:
        """The mask is that of the recipe; the result is the source times the mask, with +0."""
        entry, (first, bits, keep) = self._task.tensors[position], piece
        last = first + len(bits)
        kept = read_keep(self._masks, entry.name, first, last)
        written: Array = np.empty_like(bits)
        read_into(path, entry.start + first * bits.itemsize, written.data.cast("B"))
        if entry.name in self._updated:  # the report has a checksum of what was kept
            bits = written
            add_checksum(counts, position, written)
        self._add(entry.name, _VALUES, written != bits * kept, first)
        self._add(entry.name, _ORDER, kept != keep, first)
        if last == entry.numel and last % 8:
            tail = read_keep(self._masks, entry.name, last, -(-last // 8) * 8)
            self._add(entry.name, _TAIL, tail, last)
        self._num_pruned += len(kept) - int(np.count_nonzero(kept))
        self._num_bytes += bits.nbytes
        return bits.nbytes

    def _add(self, name: str, what: str, are_wrong: Array, first: int) -> None:
        places = np.flatnonzero(are_wrong)
        if len(places):
            count, at = self._wrong.get((name, what), (0, first + int(places[0])))
            self._wrong[name, what] = count + len(places), at


_COPIED = "bytes differ from the source, and belong to no pruned tensor"
_VALUES = "elements are neither kept as they were nor pruned as the mask says"
_ORDER = "elements are pruned or kept against the order of scores"
_TAIL = "bits of the last byte of its mask belong to no element"
