"""``prune``: carry out a plan, on one process or on all ranks together.

plan --> find_cuts --cuts--> files written --> partial folder --> destination
         (scope "global")    (each once)          (one rename)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from distprune.base.memory import Array
from distprune.files.cuts import Cuts, find_cuts
from distprune.files.lowest import LowestElements
from distprune.files.output import resolve_destination
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan
from distprune.files.reading import Source
from distprune.files.reports import Record, Report, RunFacts, parse_report
from distprune.files.reports.building import check_counts, make_report
from distprune.files.reports.model_card import card_of
from distprune.files.results import Completed, check_unchanged, make_result, prune_task, versions
from distprune.files.rewriting import Pieces
from distprune.files.team import Progress, Team
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world


def prune(
    plan: Plan,
    destination: str | Path,
    *,
    communicator: Communicator | None = None,
    progress: Callable[[Progress], None] | None = None,
    replace: bool = False,
    tell: Callable[[str], None] | None = None,
    cuts: Any = None,
) -> Report:
    """Write a pruned copy of a checkpoint.

    The copy has the same files, headers and index; every byte is that of the source except in
    pruned elements, which become +0. Other files are copied. ``destination/distprune/`` has the
    masks, the recipe and the report, and the statistics of activations if the scores are made from
    them. All files but ``distprune/report.json``, which
    says how the run went, are the same to the byte for every number of ranks.

    The destination appears by one rename at the end, or not at all. The next call with the same
    plan makes the files that an interrupted run has not finished (in ``destination.partial``);
    :func:`~distprune.files.output.discard` removes them. If the same plan has made the destination
    already, nothing is done.

    Args:
        plan: what to do; the same on every rank.
        destination: a name that is free, in a folder that exists and that all ranks see.
        communicator: of the ranks that take part; by default of the default process group, or
            this process alone if there is none.
        progress: called about twice a second, with what all ranks have done.
        replace: take the place of a finished result of another command at the destination, which
            stays until this one is complete. Nothing else is replaced: no input, and no folder that
            holds other files.
        tell: called with sentences for the user: that a run continues, or that nothing is left to
            do.
        cuts: of :class:`RankedMasks` for the same recipe and source; None: they are found.

    Returns:
        The report, the same on every rank.

    Raises:
        NaNError: a NaN in a selected tensor.
        SelectionError: more is to be pruned than there are numbers.
        CheckpointError: the source cannot be read, or has changed.
        OutputError: the destination is taken or in use, something is in the way, or the disk is
            full.
        RanksError: the ranks were called with different plans, or one was lost.
        Each is raised on every rank that is left. The text says what is left on the disk.

    Cost: reads weights twice and writes them once (row and N:M reads them once; normalised scores
    are read four times, and all once more if they are so many that the keys around the cut do not
    fit into memory). A killed run makes at most one file per rank again. Memory: a few hundred
    megabytes per process. Scores "wanda" and "stade" have 32
    bits or more. Communication: an all-reduce of 32 bytes twice a second, and some of up to 32 KiB.
    """
    team = Team(communicator or world(), progress)
    target = resolve_destination(destination)
    team.compare(_facts(plan, target))
    task = prune_task(plan, replaces=replace)
    source = Source(plan, team.count)
    found: list[Cuts] = []

    def rank() -> Pieces:
        found.append(find_cuts(team, source, cuts))
        return LowestElements(source, found[0]).pieces

    def complete(records: Sequence[Record], run: RunFacts) -> Completed:
        return _complete(source, found[0], records, run)

    return parse_report(make_result(team, task, target, rank, complete, tell))


class RankedMasks:
    """The masks of a plan, tensor by tensor, before anything is written.

    Args:
        plan: what to prune.
        team: the ranks.
        cuts: what :attr:`cuts` was on an earlier run; None: they are found. Collective then.

    Attributes:
        cuts: where rankings are cut, as JSON.

    Raises, Cost: as :func:`prune`, for what is read before it writes.
    """

    def __init__(self, plan: Plan, team: Team, cuts: Any = None) -> None:
        self._source = Source(plan, team.count)
        self._positions = {tensor.entry.name: i for i, tensor in enumerate(plan.tensors)}
        found = find_cuts(team, self._source, cuts)
        self.cuts = asdict(found)
        self._lowest = LowestElements(self._source, found)

    def keep(self, name: str) -> Array:
        """bool, of the shape of the tensor: which of its elements are kept."""
        position = self._positions[name]
        entry = self._source.plan.tensors[position].entry
        keep: Array = np.empty(entry.numel, dtype=np.bool_)
        for piece in self._lowest.pieces(position, defaultdict(Counter)):
            keep[piece.first : piece.first + len(piece.keep)] = piece.keep
        return keep.reshape(entry.shape)


def _complete(source: Source, cuts: Cuts, records: Sequence[Record], run: RunFacts) -> Completed:
    """The report, the recipe, and what else stands beside the weights and masks."""
    plan = source.plan
    report = make_report(source, cuts, records, run)
    check_counts(report, plan)
    card = card_of(plan, report)
    others: dict[str, bytes | Iterable[bytes]] = {} if card is None else {CARD_FILE: card}
    inputs = plan.inputs
    if inputs.statistics is not None:
        others[STATISTICS_FILE] = inputs.statistics.blocks()
    if inputs.given is not None:
        check_unchanged(inputs.given.checkpoint.folder, inputs.given.checkpoint.files)
    return report.to_json(), plan.recipe.as_stored().to_yaml().encode(), others


def _facts(plan: Plan, target: Path) -> list[tuple[str, str]]:
    """What has to be the same on all ranks, by what a user would call it."""
    recipe = [(f"recipe.{field}", repr(value)) for field, value in plan.recipe.as_values().items()]
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
