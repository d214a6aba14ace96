"""``verify``: compare a pruned checkpoint with its source, byte by byte.

Of what the run left behind, only the recipe, and statistics of activations if the scores are made
from them, are trusted; and where kept weights were updated, the checksums of these weights. The
source is ranked again, as ``prune`` ranks it; then masks and weights have to be those that
``prune`` writes, and so has the report.

[Note: rounds] The last of several rounds ranked what the round before left, which is gone: nothing
tells whether these are the lowest scores. There the masks of the result say what is pruned.
Everything else is compared: the zeros, the counts, the other bytes, the checksums of weights that
moved, and the report but for what its ranking read: thresholds, ties, divisors, and zeros and NaN
before it.

 plan --> find_cuts --cuts--> all ranks read source, result and masks --findings--> report
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distprune._common.collectives import Communicator
from distprune._common.process_groups import world
from distprune.files.checkpoints.checkpoint import SourceFile
from distprune.files.checkpoints.mask_files import MASK_FILE, mask_layout
from distprune.files.comparison import Comparison
from distprune.files.cuts import find_cuts
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    Interrupted,
    NaNError,
    SelectionError,
)
from distprune.files.kept_values import KeptValues
from distprune.files.lowest import LowestElements
from distprune.files.partial import RECIPE_FILE, check_unchanged
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan, plan
from distprune.files.reading import Source
from distprune.files.recipe import FileRecipe
from distprune.files.reports.building import make_report, with_digest
from distprune.files.reports.model_card import card_problem
from distprune.files.reports.report import (
    REPORT_FILE,
    RUN_FILE,
    Record,
    Report,
    identity_of,
    parse_report,
    read_text,
    recipe_of,
)
from distprune.files.rewriting import Pieces, masked_pieces, rewritten
from distprune.files.team import Progress, Team
from distprune.files.text import printable
from distprune.files.units import CopyUnit, Unit, copy_units, prune_units, units_by_rank


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
    stop: Callable[[], bool] | None = None,
) -> VerifyReport:
    """Check a pruned checkpoint against its source.

    The destination has to have the files that :func:`prune` writes, in full, and no others. Every
    mask has to be the one that the recipe leads to, ties included; every byte outside of the pruned
    elements has to be that of the source, and every pruned element +0. ``report.json``,
    ``recipe.yaml`` and the model card have to be those that :func:`prune` writes. ``run.json``
    differs from run to run: only its form and its number of bytes are compared. Of a pruning in
    rounds the order of scores is not compared; see [Note: rounds].

    Args:
        destination: a folder that :func:`prune` wrote, with masks; visible to every rank.
        source: the checkpoint that it was made from, or a copy of it.
        scores: the scores that it was ranked by, or a copy of them, if they were given.
        communicator: of the ranks that share the work; by default of the default process group,
            or this process alone if there is none.
        progress: called about twice a second, with what all ranks have done.
        stop: called after every few megabytes; True on any rank stops all of them.

    Returns:
        The report, the same on every rank, whatever their number.

    Raises:
        CheckpointError: a folder cannot be read, the destination has no masks or no report, or it
            was made from another source.
        Interrupted: ``stop`` returned True; nothing was changed.
        RanksError: the ranks were called with different folders, or one was lost.
        Each is raised on every rank that is left.

    Cost: the reads that :func:`prune` needs to rank the source, and one read of source, result and
    masks; memory as for pruning. Communication as for pruning.
    """
    team = Team(communicator or world(), progress, stop)
    result: _Result = team.attempt(_Result, Path(destination), source, scores)
    target = ascii(os.path.abspath(destination))
    team.compare([("destination", target), ("plan", result.plan.digest)])
    try:
        return _verified(team, result)
    except Interrupted as error:
        raise Interrupted("stopped as asked; nothing was changed.") from error
    except (NaNError, SelectionError) as error:
        raise _misfit(destination, source, error) from error


class _Result:
    """A result and its source: their headers and small files."""

    def __init__(self, folder: Path, source: str | Path, scores: str | Path | None) -> None:
        self.folder = folder
        _check_folder(folder)
        self.report_text = read_text(folder, REPORT_FILE)
        self.run_text = read_text(folder, RUN_FILE)
        self.report: Report = parse_report(self.report_text, self.run_text, str(folder))
        self.recipe: FileRecipe = recipe_of(self.report, str(folder))
        if not self.recipe.masks and not os.path.lexists(folder / MASK_FILE):
            raise CheckpointError(
                f"{folder} was pruned without masks (masks: false); verify needs them. Prune again "
                "with masks, and compare the two results with `distprune diff`."
            )
        try:
            located = _located(self.recipe, folder, scores)
            update = (self.report.inputs or {}).get("update")
            values = None if update is None else KeptValues.from_json(update)
            self.has_order = values is None or not values.facts.get("rounds")
            self.plan: Plan = plan(source, located, follow_links=True, values=values)
        except SelectionError as error:
            raise _misfit(folder, source, error) from error
        checkpoint = self.plan.checkpoint
        self.layout = mask_layout([tensor.entry for tensor in self.plan.tensors], checkpoint.files)
        # What is wrong with files, and the names of those whose content cannot be compared.
        self.problems, self.bad = _look_through(folder, self._sizes())
        self.has_expected_masks = MASK_FILE not in self.bad
        if self.has_expected_masks:
            with open(folder / MASK_FILE, "rb") as file:
                header = file.read(len(self.layout.header))
            self.has_expected_masks = header == self.layout.header
        expected = identity_of(checkpoint).items()
        is_same = all(self.report.source.get(name) == identity for name, identity in expected)
        if not self.has_expected_masks and not is_same:
            raise CheckpointError(
                f"{folder} was not made from {source}: the sizes or headers of the weight files "
                "were others."
            )
        rewritten = {tensor.entry.name for tensor in self.plan.tensors}
        copies = copy_units(checkpoint, rewritten, self.plan.copied)
        self.units: list[Unit] = [*prune_units(self.plan), *copies]

    def _sizes(self) -> dict[str, int | None]:
        """By name of each file of a result, its size; None if the size may vary."""
        plan = self.plan
        files: list[SourceFile] = [*plan.checkpoint.files, *plan.copied]
        sizes: dict[str, int | None] = {file.name: file.size for file in files}
        small = [REPORT_FILE, RUN_FILE, RECIPE_FILE]
        small += [CARD_FILE] if plan.has_card else []
        small += [STATISTICS_FILE] if plan.inputs.statistics is not None else []
        return sizes | {MASK_FILE: self.layout.size} | dict.fromkeys(small)

    def is_readable(self, unit: Unit) -> bool:
        """Whether a unit can be compared."""
        if isinstance(unit, CopyUnit):
            return unit.name not in self.bad
        entries = [self.plan.tensors[span.position].entry for span in unit.spans]
        return self.has_expected_masks and not any(entry.file in self.bad for entry in entries)


def _verified(team: Team, result: _Result) -> VerifyReport:
    """The comparison on all ranks."""
    plan, comparison = result.plan, Comparison(result.folder, result.plan, result.layout)
    source = Source(plan, functools.partial(team.did_in, "count"))
    with contextlib.closing(source), contextlib.closing(comparison.outputs):
        team.expect("verify", sum(unit.num_bytes for unit in result.units))
        cuts = None
        if result.has_order:
            cuts = find_cuts(team, plan, source)
        units = [(i, unit) for i, unit in enumerate(result.units) if result.is_readable(unit)]
        mine = units_by_rank(units, team.size)[team.index]
        records: list[Record] = []

        def steps() -> Iterator[int]:
            entries = [tensor.entry for tensor in plan.tensors]
            pieces: Pieces = (
                masked_pieces(plan.checkpoint, entries, source.files, comparison.masks)
                if cuts is None
                else LowestElements(plan, source, cuts).pieces
            )
            for number in mine:
                unit = result.units[number]
                if isinstance(unit, CopyUnit):
                    yield from comparison.compare_copy(source.files, unit)
                else:
                    record: dict[str, Any] = {"unit": number}
                    yield from rewritten(unit, pieces, comparison.add, record)
                    records.append(record)

        def derive() -> Report:
            ranking = result.report if cuts is None else (source, cuts)
            return make_report(plan, ranking, records, result.report.run)

        team.begin("verify", sum(unit.num_bytes for _, unit in units))
        team.work(steps())
        for index, (state, of_rank) in enumerate(team.share([comparison.state(), records])):
            if index != team.index:
                comparison.merge(state)
                records += of_rank
        team.attempt(check_unchanged, plan.checkpoint.folder, plan.checkpoint.all_files)
        problems = team.from_leader(lambda: _problems(result, comparison, derive))
    num_pruned = comparison.num_pruned
    return VerifyReport(
        tuple(problems), comparison.num_bytes, plan.num_elements, num_pruned, result.has_order
    )


def _problems(result: _Result, comparison: Comparison, derive: Callable[[], Report]) -> list[str]:
    """Everything that is wrong, in an order that does not depend on the ranks.

    Args:
        derive: returns the report that all counts lead to.
    """
    problems = list(result.problems)
    if MASK_FILE not in result.bad and not result.has_expected_masks:
        problems.append(
            f"{MASK_FILE}: its header is not the one that prune writes for these tensors."
        )
    problems += comparison.problems()
    if all(map(result.is_readable, prune_units(result.plan))):
        problems += _report_problems(result, comparison.num_pruned, derive())
    else:
        problems.append(f"{REPORT_FILE} was not compared, as not all weights and masks could be.")
    run, num_bytes = result.report.run, sum(unit.num_bytes for unit in result.units)
    if run.num_bytes != num_bytes:
        problems.append(f"{RUN_FILE}: num_bytes is {run.num_bytes}; expected {num_bytes}.")
    if result.run_text != run.to_json():
        problems.append(f"{RUN_FILE}: its bytes are not those that prune writes.")
    if RECIPE_FILE not in result.bad:
        recipe = result.recipe.as_stored().to_yaml().encode()
        if read_text(result.folder, RECIPE_FILE) != recipe:
            problems.append(f"{RECIPE_FILE} is not the text of the recipe in {REPORT_FILE}.")
    return problems


def _report_problems(result: _Result, num_pruned: int, derived: Report) -> list[str]:
    """What is wrong with counts, with the report, and with the card that states its numbers."""
    plan, problems = result.plan, []
    if num_pruned != plan.num_to_prune:
        problems.append(
            f"{num_pruned} elements are pruned in all; the recipe asks for {plan.num_to_prune}."
        )
    expected = with_digest(derived, result.report, plan).result_json()
    if result.report_text != expected:
        values, stored = json.loads(expected), json.loads(result.report_text)
        fields = [key for key in values | stored if stored.get(key) != values.get(key)]
        what = f" ({', '.join(map(printable, fields))})" if fields else ", to the byte"
        problems.append(f"{REPORT_FILE} is not the report of this result{what}.")
    elif CARD_FILE not in result.bad:
        problem = card_problem(result.folder, plan, result.report)
        problems += [problem] if problem else []
    return problems


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


def _located(recipe: FileRecipe, folder: Path, scores: str | Path | None) -> FileRecipe:
    """The recipe of a result with the paths of what its scores were made from."""
    if recipe.statistics is not None:
        recipe = replace(recipe, statistics=str(folder / STATISTICS_FILE))
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
    return replace(recipe, scores=str(scores))


def _misfit(folder: str | Path, source: str | Path, error: FilesError) -> CheckpointError:
    headline = f"the recipe in {folder}/{REPORT_FILE} does not fit {source}: {error.headline}"
    return CheckpointError(headline, error.problems)


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
