"""``prune``: carry out a plan, on one process or on all ranks together.

plan --> find_cuts --cuts--> Rewriter --> partial folder --> destination
         (scope "global")    (each unit once)       (one rename)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from distprune._common.collectives import Communicator
from distprune._common.process_groups import world
from distprune.files.checkpoints.mask_files import mask_layout
from distprune.files.cuts import Cuts, add_up, find_cuts
from distprune.files.disk.access import OpenFiles
from distprune.files.disk.destination import resolve_destination
from distprune.files.lowest import LowestElements
from distprune.files.partial import Partial, check_unchanged
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan, plan
from distprune.files.reading import Source, bytes_to_count
from distprune.files.recipe import FileRecipe
from distprune.files.reports.building import check_counts, make_report
from distprune.files.reports.model_card import card_of
from distprune.files.reports.report import Report, RunFacts, parse_report
from distprune.files.results import carry_out, versions
from distprune.files.team import Progress, Team
from distprune.files.units import Task, prune_units


def plan_together(
    source: str | Path,
    recipe: FileRecipe,
    *,
    communicator: Communicator | None = None,
    follow_links: bool = False,
) -> Plan:
    """:func:`plan` on every rank; if it fails on one, it fails on all.

    Raises:
        CheckpointError, SelectionError: as :func:`plan`, on every rank.
    """
    return Team(communicator or world()).attempt(
        functools.partial(plan, follow_links=follow_links), source, recipe
    )


def prune(
    plan: Plan,
    destination: str | Path,
    *,
    communicator: Communicator | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    take_over: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Write a pruned copy of a checkpoint.

    The copy has the same files, headers and index; every byte is that of the source except in
    pruned elements, which become +0. Other files are copied. ``destination/distprune/`` has the
    masks, the recipe and the report, and the statistics of activations if the scores are made from
    them. All files but ``distprune/run.json`` are the same to the byte
    for every number of ranks.

    The destination appears by one rename at the end, or not at all. The next call with the same
    plan compares what an interrupted run left (``destination.partial-...``) with its checksums, and
    continues it; :func:`~distprune.files.partial.discard` removes it. If the same plan has
    made the destination already, nothing is done.

    Args:
        plan: what to do; the same on every rank.
        destination: a name that is free, in a folder that exists and that all ranks see.
        communicator: of the ranks that take part; by default of the default process group, or
            this process alone if there is none.
        progress: called about twice a second, with what all ranks have done.
        stop: called after every few megabytes; True on any rank stops all of them.
        take_over: replace the lock of a run that is not known to run on this machine. If that run
            is at work after all, it stops with an error.
        tell: called with sentences for the user: that a run continues, or that nothing is left to
            do.

    Returns:
        The report, the same on every rank.

    Raises:
        NaNError: a NaN in a selected tensor.
        SelectionError: more is to be pruned than there are numbers.
        CheckpointError: the source cannot be read, or has changed.
        OutputError: the destination is taken or in use, something is in the way, or the disk is
            full.
        RanksError: the ranks were called with different plans, or one was lost.
        Interrupted: ``stop`` returned True.
        Each is raised on every rank that is left. The text says what is left on the disk.

    Cost: reads weights twice and writes them once (row and N:M reads them once; scores of more than
    16 bits four times if they are normalised, and three times if they are so many that the keys
    around the cut do not fit into memory), and reads once what an interrupted run had done; a few
    hundred megabytes of memory per process, whatever the size. Scores "wanda" and "stade" have 32
    bits or more. Communication: an all-reduce of 32 bytes twice a second, and some of up to 32 KiB.
    """
    team = Team(communicator or world(), progress, stop)
    target = resolve_destination(destination)
    team.compare(_facts(plan, target))
    layout = None
    if plan.recipe.masks:
        entries = [tensor.entry for tensor in plan.tensors]
        layout = mask_layout(entries, plan.checkpoint.files)
    written_last = [CARD_FILE] if plan.has_card else []
    written_last += [STATISTICS_FILE] if plan.inputs.statistics is not None else []
    task = Task(
        checkpoint=plan.checkpoint,
        digest=plan.digest,
        tensors=[tensor.entry for tensor in plan.tensors],
        make_units=lambda: prune_units(plan),
        layout=layout,
        copied=plan.copied,
        written_last=written_last,
    )
    work = _Pruning(team, plan)
    try:
        result, run = carry_out(team, task, work, target, take_over=take_over, tell=tell)
        return parse_report(result, run)
    finally:
        work.close()


class _Pruning:
    """How a plan is carried out; see ``resuming.Work``."""

    def __init__(self, team: Team, plan: Plan) -> None:
        self._team = team
        self._plan = plan
        self._source = Source(plan, self._did_read)
        self._is_counting = False
        self._cuts: Cuts | None = None

    @property
    def sources(self) -> OpenFiles:
        return self._source.files

    def bytes_to_prepare(self) -> int:
        return bytes_to_count(self._plan)

    def prepare(self, partial: Partial, prepared: Any) -> None:
        """Find where groups that are ranked together are cut; once for all runs of a plan."""
        if prepared is not None:
            self._cuts = Cuts.from_json(prepared)
            self._source.divide(self._cuts.divisors)
            add_up(self._team, self._plan, self._source)
            return
        self._team.begin("count", self.bytes_to_prepare())
        self._is_counting = True
        self._cuts = find_cuts(self._team, self._plan, self._source)
        self._is_counting = False
        if any(group.recipe.is_global for group in self._plan.groups):
            self._team.from_leader(partial.finished_units.write_prepared, self._cuts.to_json())

    def elements(self) -> LowestElements:
        assert self._cuts is not None
        return LowestElements(self._plan, self._source, self._cuts)

    def complete(self, partial: Partial, run: RunFacts) -> None:
        assert self._cuts is not None
        report = make_report(
            self._plan, self._source, self._cuts, partial.finished_units.records(), run
        )
        check_counts(report, self._plan)
        recipe = self._plan.recipe.as_stored().to_yaml().encode()
        card = card_of(self._plan, report)
        others: dict[str, bytes | Iterable[bytes]] = {} if card is None else {CARD_FILE: card}
        inputs = self._plan.inputs
        if inputs.statistics is not None:
            others[STATISTICS_FILE] = inputs.statistics.blocks()
        if inputs.given is not None:
            check_unchanged(inputs.given.checkpoint.folder, inputs.given.checkpoint.files)
        partial.complete(recipe, report.run_json(), report.result_json(), others)

    def close(self) -> None:
        self._source.close()

    def _did_read(self, num_bytes: int) -> None:
        """Report reads: as progress, unless what is read is written too."""
        self._team.did(num_bytes if self._is_counting else 0)


def _facts(plan: Plan, target: Path) -> list[tuple[str, str]]:
    """What has to be the same on all ranks, by what a user would call it."""
    recipe = [(f"recipe.{field}", repr(value)) for field, value in plan.recipe.as_fields().items()]
    sources = [
        (f"source {file.name!a}", f"{file.size} bytes, header {file.header_crc:08x}")
        for file in plan.checkpoint.files
    ]
    return [
        ("destination", ascii(str(target))),
        *recipe,
        *versions().items(),
        *sources,
        ("plan", plan.digest),
    ]
