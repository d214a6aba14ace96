"""``prune``: carry out a plan, on one process or on all ranks together.

 plan --units--> deciding --threshold and quotas--> rewriting --> partial folder --> destination
                 (scope "global")                 (each unit once)      (one rename)

[Note: resume] Units and the decision depend on the plan alone. A unit that was done is noted once
its bytes are on the disk; one that was not is done again from the source, which is never changed.
So whatever was interrupted, and with whatever number of ranks it goes on, the bytes are the same.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distprune._common.collectives import Communicator, attempt, world
from distprune.files.deciding import Decision, decide
from distprune.files.errors import NaNError, SelectionError
from distprune.files.masks import MaskLayout, mask_layout
from distprune.files.partial import Journal, Partial
from distprune.files.planning import Plan, plan
from distprune.files.recipe import FileRecipe
from distprune.files.report import Report, RunFacts, make_report, parse_report
from distprune.files.rewriting import Rewriter
from distprune.files.streaming import Source
from distprune.files.team import Progress, Team
from distprune.files.units import Unit, copy_units, prune_units, share_out


def plan_together(
    source: str | Path, recipe: FileRecipe, *, communicator: Communicator | None = None
) -> Plan:
    """:func:`plan` on every rank; if it fails on one, it fails on all.

    Raises:
        CheckpointError, SelectionError: as :func:`plan`, on every rank.
    """
    return Team(communicator or world()).attempt(plan, source, recipe)


def prune(
    plan: Plan,
    destination: str | Path,
    *,
    communicator: Communicator | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Report:
    """Write a pruned copy of a checkpoint.

    Same files, headers and index; every byte is that of the source but for the pruned elements,
    which become +0. Other files are copied. ``destination/distprune/`` holds the masks, the recipe
    and the report. All files but ``distprune/run.json`` are the same to the byte for every number
    of ranks.

    The destination appears by one rename at the end, or not at all. What an interrupted run leaves
    (``destination.partial-...``) is taken up by the next call with the same plan.

    Args:
        plan: what to do; the same on every rank.
        destination: a name that is free, in a folder that exists and that all ranks see.
        communicator: of the ranks that take part; by default of the default process group, or
            this process alone if there is none.
        progress: called about twice a second, with what all ranks have done.
        stop: asked after every few megabytes; True on any rank stops all of them.

    Returns:
        The report, the same on every rank.

    Raises:
        NaNError: a NaN in a selected tensor.
        SelectionError: more is to be pruned than there are numbers.
        CheckpointError: the source cannot be read, or has changed.
        OutputError: the destination is taken, or the disk full.
        RanksError: the ranks were called with different plans, or one was lost.
        Interrupted: ``stop`` said so.
        On every rank, but for a lost one.

    Cost: reads 16-bit weights twice and writes them once (fp32 three times in scope "global"; row
    and N:M once); a few hundred megabytes of memory per process, whatever the size. Communication:
    an all-reduce of 32 bytes twice a second, and a few of up to 512 KiB.
    """
    team = Team(communicator or world(), progress, stop)
    target = Path(os.path.abspath(destination))
    team.compare(_facts(plan, target))
    layout = None
    if plan.recipe.masks:
        entries = [tensor.entry for tensor in plan.tensors]
        layout = mask_layout(entries, plan.checkpoint.files)
    partial = Partial(plan, target, layout)
    source = Source(plan)
    try:
        state = team.from_leader(partial.start)
        if not state["is_complete"]:
            _Run(team, plan, partial, source, state).work(layout)
        return parse_report(*team.from_leader(partial.publish))
    except (NaNError, SelectionError):
        team.check(None)  # until every rank has closed its files
        if team.is_leader:  # the same plan would fail again
            partial.discard()
        raise
    finally:
        source.close()
        partial.lock.release()


class _Run:
    """One call of :func:`prune` that has something left to do.

    Args:
        state: as ``Partial.start`` returned it, the same on every rank.
    """

    def __init__(
        self, team: Team, plan: Plan, partial: Partial, source: Source, state: dict[str, Any]
    ) -> None:
        self._team = team
        self._plan = plan
        self._partial = partial
        self._source = source
        self._state = state
        self._prune_units = prune_units(plan)
        self._units: list[Unit] = [*self._prune_units, *copy_units(plan)]

    def work(self, layout: MaskLayout | None) -> None:
        """All that comes before the rename."""
        began = time.monotonic()
        decision = self._decide()
        decided = time.monotonic()
        self._write(layout, decision)
        seconds = {"count": decided - began, "write": time.monotonic() - decided}
        peaks = torch.zeros(self._team.size, dtype=torch.int64)
        peaks[self._team.index] = _peak_rss_bytes()
        run = RunFacts(
            num_ranks=self._team.size,
            seconds={phase: round(value, 3) for phase, value in seconds.items()},
            peak_rss_bytes=self._team.sum(peaks).tolist(),
            num_bytes=sum(unit.num_bytes for unit in self._units),
            versions=_versions(),
        )
        self._team.from_leader(self._complete, decision, run)

    def _decide(self) -> Decision | None:
        """Of tensors that are ranked together: where the ranking is cut; found once per plan."""
        if self._plan.tensors[0].num_groups:
            return None
        if self._state["decision"] is not None:
            return Decision(**self._state["decision"])
        units = self._prune_units
        mine = share_out(list(enumerate(units)), self._team.size)[self._team.index]
        decision = decide(self._team, self._plan, self._source, units, mine)
        self._team.from_leader(self._partial.write_decision, decision)
        return decision

    def _write(self, layout: MaskLayout | None, decision: Decision | None) -> None:
        done = set(self._state["done"])
        left = [(i, unit) for i, unit in enumerate(self._units) if i not in done]
        mine = share_out(left, self._team.size)[self._team.index]
        folder = self._partial.folder
        rewriter = Rewriter(self._plan, self._source, folder, layout, decision)
        journal = Journal(
            self._partial.work, self._state["run"], self._team.index, rewriter.outputs
        )
        total = sum(unit.num_bytes for unit in self._units)
        num_done = total - sum(unit.num_bytes for _, unit in left)
        try:
            try:
                self._team.work(self._steps(mine, rewriter, journal), "write", num_done, total)
            finally:
                # What is done counts, whatever stopped the rest; an error here comes second.
                _, error = attempt(journal.flush)
            self._team.check(error)
        finally:
            rewriter.outputs.close()

    def _steps(self, mine: list[int], rewriter: Rewriter, journal: Journal) -> Iterator[int]:
        for number in mine:
            unit = self._units[number]
            yield from rewriter.do(number, unit)
            journal.add({"unit": number, **rewriter.record()}, unit.num_bytes)

    def _complete(self, decision: Decision | None, run: RunFacts) -> None:
        records = self._partial.records()
        assert [record["unit"] for record in records] == list(range(len(self._units)))
        report = make_report(self._plan, self._source, decision, records, run)
        self._partial.complete(report)


def _facts(plan: Plan, target: Path) -> list[tuple[str, str]]:
    """What has to be the same on all ranks, by what a user would call it."""
    recipe = [(f"recipe.{field}", repr(value)) for field, value in asdict(plan.recipe).items()]
    sources = [
        (f"source {file.name!a}", f"{file.size} bytes, header {file.header_crc:08x}")
        for file in plan.checkpoint.files
    ]
    versions = list(_versions().items())
    return [
        ("destination", ascii(str(target))),
        *recipe,
        *versions,
        *sources,
        ("plan", plan.digest),
    ]


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
