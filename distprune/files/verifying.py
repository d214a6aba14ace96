"""``verify``: compare a pruned checkpoint with its source, byte by byte.

Of what the run left behind, only the recipe, and statistics of activations if the scores are made
from them, are trusted. The source is ranked again, as ``prune`` ranks it; then masks and weights
have to be those that ``prune`` writes, and so has the report.

 plan --> find_cuts --cuts--> all ranks read source, result and masks --findings--> report
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from distprune._common.collectives import Communicator
from distprune._common.process_groups import world
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskLayout, mask_layout
from distprune.files.checks.claims import (
    recipe_of,
    recipe_problems,
    report_problems,
    run_problems,
    with_digest,
)
from distprune.files.checks.contents import Contents, expected_sizes, look_through
from distprune.files.checks.findings import Findings
from distprune.files.checks.side_by_side import SideBySide
from distprune.files.cuts import Cuts, find_cuts
from distprune.files.disk.access import OpenFiles
from distprune.files.errors import (
    CheckpointError,
    FilesError,
    Interrupted,
    NaNError,
    SelectionError,
)
from distprune.files.partial import RECIPE_FILE, check_unchanged
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan, plan
from distprune.files.reading import Source, bytes_to_count
from distprune.files.recipe import FileRecipe
from distprune.files.reports.building import derive_report
from distprune.files.reports.model_card import card_problem
from distprune.files.reports.report import (
    REPORT_FILE,
    RUN_FILE,
    Report,
    identity_of,
    parse_report,
    read_text,
)
from distprune.files.team import Progress, Team
from distprune.files.units import CopyUnit, Unit, copy_units, prune_units, units_by_rank


@dataclass(frozen=True)
class VerifyReport:
    """The result of a comparison.

    Attributes:
        problems: everything that is wrong; empty if the result is what the recipe asks for.
        num_bytes: of the source that were compared.
        num_elements: of the selected tensors.
        num_pruned: of these elements, according to the masks.
    """

    problems: tuple[str, ...]
    num_bytes: int
    num_elements: int
    num_pruned: int

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
    elements has to be that of the source, and every pruned element +0. ``report.json`` and
    ``recipe.yaml`` have to be those that :func:`prune` writes. ``run.json`` differs from run to
    run; its values only have to be possible.

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
    opened: _Opened = team.attempt(_Opened, Path(destination), source, scores)
    target = ascii(os.path.abspath(destination))
    team.compare([("destination", target), ("plan", opened.plan.digest)])
    try:
        return _Checking(team, opened).run()
    except Interrupted as error:
        raise Interrupted("stopped as asked; nothing was changed.") from error
    except (NaNError, SelectionError) as error:
        raise _misfit(destination, source, error) from error


class _Opened:
    """Both folders: their headers and small files."""

    def __init__(self, folder: Path, source: str | Path, scores: str | Path | None) -> None:
        self.folder = folder
        _check_folder(folder)
        self.report_text = read_text(folder, REPORT_FILE)
        self.run_text = read_text(folder, RUN_FILE)
        self.report: Report = parse_report(self.report_text, self.run_text, str(folder))
        recipe = recipe_of(self.report, str(folder))
        if not recipe.masks and not os.path.lexists(folder / MASK_FILE):
            raise CheckpointError(
                f"{folder} was pruned without masks (masks: false); verify needs them. Prune again "
                "with masks, and compare the two results with `distprune diff`."
            )
        self.recipe: FileRecipe = recipe
        try:
            located = _located(recipe, folder, scores)
            self.plan: Plan = plan(source, located, follow_links=True)
        except SelectionError as error:
            raise _misfit(folder, source, error) from error
        source_checkpoint = self.plan.checkpoint
        entries = [tensor.entry for tensor in self.plan.tensors]
        self.layout: MaskLayout = mask_layout(entries, source_checkpoint.files)
        self.contents: Contents = look_through(folder, expected_sizes(self.plan, self.layout))
        self.has_expected_masks = self._has_expected_masks()
        expected = identity_of(source_checkpoint).items()
        is_same = all(self.report.source.get(name) == identity for name, identity in expected)
        if not self.has_expected_masks and not is_same:
            raise CheckpointError(
                f"{folder} was not made from {source}: the sizes or headers of the weight files "
                "were others."
            )

    def _has_expected_masks(self) -> bool:
        """Whether the mask file has the header that this plan leads to."""
        if MASK_FILE in self.contents.bad:
            return False
        with open(self.folder / MASK_FILE, "rb") as file:
            return file.read(len(self.layout.header)) == self.layout.header


class _Checking:
    """One comparison, on all ranks."""

    def __init__(self, team: Team, opened: _Opened) -> None:
        self._team = team
        self._opened = opened
        self._plan = opened.plan
        self._source = Source(opened.plan, self._did_read)
        self._is_counting = True
        self._outputs = OpenFiles(os.O_RDONLY)

    def run(self) -> VerifyReport:
        try:
            cuts = self._find_cuts()
            findings = self._compare(cuts)
            problems = self._team.from_leader(self._problems, findings, cuts)
            return VerifyReport(
                tuple(problems), findings.num_bytes, self._plan.num_elements, findings.num_pruned
            )
        finally:
            self._source.close()
            self._outputs.close()

    def _find_cuts(self) -> Cuts:
        """Where the recipe cuts the rankings of the source."""
        self._team.expect("verify", sum(unit.num_bytes for _, unit in self._units()))
        self._team.begin("count", bytes_to_count(self._plan))
        cuts = find_cuts(self._team, self._plan, self._source)
        self._is_counting = False
        return cuts

    def _did_read(self, num_bytes: int) -> None:
        self._team.did(num_bytes if self._is_counting else 0)

    def _compare(self, cuts: Cuts) -> Findings:
        """The findings of all ranks in all files."""
        units = [(number, unit) for number, unit in self._units() if self._is_readable(unit)]
        mine = set(units_by_rank(units, self._team.size)[self._team.index])
        total = sum(unit.num_bytes for _, unit in units)
        opened = self._opened
        comparison = SideBySide(
            self._plan, self._source, cuts, opened.folder, opened.layout, self._outputs
        )
        steps = self._steps([unit for number, unit in units if number in mine], comparison)
        self._team.begin("verify", total)
        self._team.work(steps)
        findings = comparison.findings
        for index, state in enumerate(self._team.gather(findings.state())):
            if index != self._team.index:
                findings.merge(state)
        source = self._plan.checkpoint
        self._team.attempt(check_unchanged, source.folder, source.all_files)
        return findings

    def _units(self) -> list[tuple[int, Unit]]:
        rewritten = {tensor.entry.name for tensor in self._plan.tensors}
        copies = copy_units(self._plan.checkpoint, rewritten, self._plan.copied)
        return list(enumerate([*prune_units(self._plan), *copies]))

    def _is_readable(self, unit: Unit) -> bool:
        bad = self._opened.contents.bad
        if not isinstance(unit, CopyUnit):
            entries = [self._plan.tensors[span.position].entry for span in unit.spans]
            return self._opened.has_expected_masks and not any(e.file in bad for e in entries)
        return unit.name not in bad

    def _steps(self, units: list[Unit], comparison: SideBySide) -> Iterator[int]:
        for unit in units:
            if isinstance(unit, CopyUnit):
                yield from comparison.compare_copied(unit)
            else:
                yield from comparison.compare_pruned(unit)

    def _problems(self, findings: Findings, cuts: Cuts) -> list[str]:
        """Everything that is wrong, in an order that does not depend on the ranks."""
        opened = self._opened
        problems = list(opened.contents.problems)
        if MASK_FILE not in opened.contents.bad and not opened.has_expected_masks:
            problems.append(
                f"{MASK_FILE}: its header is not the one that prune writes for these tensors."
            )
        problems += findings.problems()
        if all(self._is_readable(unit) for unit in prune_units(self._plan)):
            problems += findings.count_problems()
            problems_of_report = self._report_problems(findings, cuts)
            problems += problems_of_report
            # The card states numbers of the report.
            if not problems_of_report and CARD_FILE not in opened.contents.bad:
                problem = card_problem(opened.folder, self._plan, opened.report)
                problems += [problem] if problem else []
        else:
            problems.append(
                f"{REPORT_FILE} was not compared, as not all weights and masks could be."
            )
        num_bytes = sum(unit.num_bytes for _, unit in self._units())
        problems += run_problems(opened.run_text, opened.report, num_bytes)
        if RECIPE_FILE not in opened.contents.bad:
            raw = read_text(opened.folder, RECIPE_FILE)
            problems += recipe_problems(raw, opened.recipe)
        return problems

    def _report_problems(self, findings: Findings, cuts: Cuts) -> list[str]:
        opened = self._opened
        derived = derive_report(
            self._plan, self._source, cuts, findings.records(), opened.report.run
        )
        derived = with_digest(derived, opened.report, self._plan)
        return report_problems(opened.report_text, derived)


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
            f"{folder} was ranked by given scores, which it does not hold; expected them, or a "
            "copy of them (--scores FOLDER)."
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
