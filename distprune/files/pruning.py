"""``prune`` and ``apply``: copies with zeros, on one process or on all ranks together.

plan --> find_cuts --cuts--> files written --> partial folder --> destination
         (scope "global")    (each once)          (one rename)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from distprune.base.float_formats import PLAIN_FLOATS
from distprune.files.checkpoint import Checkpoint, OtherFile, TensorEntry, open_checkpoint
from distprune.files.disk import read_into, slabs
from distprune.files.errors import CheckpointError
from distprune.files.mask_files import MASK_FILE, MaskFile, open_masks, read_keep
from distprune.files.output import REPORT_FILE, resolve_destination
from distprune.files.planning import CARD_FILE, STATISTICS_FILE, Plan, source_facts
from distprune.files.ranked import Counts, Piece, Pieces, RankedTensors
from distprune.files.reports import (
    Record,
    Report,
    RunFacts,
    as_json,
    card_of,
    identity_of,
    make_report,
    parse_report,
    summed,
)
from distprune.files.team import Progress, Team
from distprune.files.writing import (
    RECIPE_FILE,
    Task,
    check_unchanged,
    make_result,
    versions,
)
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world

_VERSION = 1  # of apply; raised when the same masks and source would give other bytes


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
        cuts: plain values of ``RankedTensors.cuts`` for the same recipe and source; None: they are
            found.

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
    recipe = [(f"recipe.{field}", repr(value)) for field, value in plan.recipe.as_values().items()]
    sources = [
        (f"source {file.name!a}", f"{file.size} bytes, header {file.header_crc:08x}")
        for file in plan.checkpoint.files
    ]
    _compare(team, target, [*recipe, *sources, ("plan", plan.digest)])
    ranked = RankedTensors(plan, team)

    def rank() -> Pieces:
        ranked.find_cuts(cuts)
        return ranked.pieces

    def complete(records: Sequence[Record], run: RunFacts) -> dict[str, bytes]:
        report = make_report(ranked, records, run)
        small = {RECIPE_FILE: plan.recipe.as_stored().to_yaml().encode()}
        small[REPORT_FILE] = report.to_json()
        if (card := card_of(plan, report)) is not None:
            small[CARD_FILE] = card
        if plan.inputs.statistics is not None:
            small[STATISTICS_FILE] = plan.inputs.statistics.data
            check_unchanged("the recipe", [plan.inputs.statistics.file])
        if plan.inputs.given is not None:
            check_unchanged(plan.inputs.given.folder, plan.inputs.given.files)
        return small

    text = make_result(team, prune_task(plan, replaces=replace), target, rank, complete, tell)
    return parse_report(text)


def prune_task(plan: Plan, *, replaces: bool = False) -> Task:
    """The files of the result of a plan."""
    inputs = [] if plan.recipe.statistics is None else [plan.recipe.statistics]
    if plan.inputs.given is not None:
        inputs += [file.path for file in plan.inputs.given.files]
    return Task(
        checkpoint=plan.checkpoint,
        digest=plan.digest,
        tensors=[tensor.entry for tensor in plan.tensors],
        copied=plan.copied,
        has_masks=plan.recipe.masks,
        values=plan.inputs.values,
        replaces=replaces,
        inputs=inputs,
    )


def _compare(team: Team, target: Path, facts: Sequence[tuple[str, str]]) -> None:
    """Raise RanksError if the ranks were called with different arguments, or versions differ."""
    team.compare([("destination", ascii(str(target))), *versions().items(), *facts])


def masked_pieces(entries: Sequence[TensorEntry], masks: MaskFile) -> Pieces:
    """What existing masks keep of the tensors of a checkpoint.

    Args:
        entries: the tensors, by position.
        masks: one for each tensor.
    """

    def pieces(position: int, counts: Counts) -> Iterator[Piece]:
        entry = entries[position]
        form = PLAIN_FLOATS[entry.dtype]
        for run in slabs(entry.numel, form.num_bytes):
            raw = np.empty(len(run) * form.num_bytes, np.uint8)
            read_into(entry.path, entry.start + run.start * form.num_bytes, raw.data)
            keep = read_keep(masks, entry.name, run.start, run.stop)
            is_zeroed = ~keep & (form.magnitudes(raw) != 0)
            counts["zeroed"][position] += int(np.count_nonzero(is_zeroed))
            yield Piece(run.start, raw.view(form.bits), keep)

    return pieces


class Application:
    """Masks and the checkpoint that they are for, checked; nothing is written yet.

    Args:
        masks: a folder that ``distprune prune`` or ``save_masks`` wrote.
        source: the checkpoint.

    Attributes:
        masks: the masks.
        checkpoint: the source.
        entries: its tensors that have a mask, in the order of the masks.
        digest: a hash of everything that decides the result: headers, sizes and times of change of
            both, and where the masks are.

    Raises:
        CheckpointError: either is malformed, or they do not fit.
    """

    def __init__(self, masks: str | Path, source: str | Path) -> None:
        self.masks: MaskFile = open_masks(masks)
        self.checkpoint: Checkpoint = open_checkpoint(source)
        by_name = {entry.name: entry for entry in self.checkpoint.tensors}
        for name, shape in self.masks.shapes.items():
            entry = by_name.get(name)
            if entry is None or entry.shape != shape or entry.dtype not in PLAIN_FLOATS:
                has = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise CheckpointError(
                    f"{masks} has a mask {list(shape)} of {name}, and {source} has {has} of this "
                    "name; expected a plain float of this shape."
                )
        self.entries: Sequence[TensorEntry] = [by_name[name] for name in self.masks.shapes]
        self._folder = os.path.abspath(masks)
        facts = {
            "kind": "apply",
            "version": _VERSION,
            "masks": [self._folder, *self.masks.state],
            **source_facts(self.checkpoint),
        }
        self.digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def write(
        self,
        destination: str | Path,
        *,
        communicator: Communicator | None = None,
        progress: Callable[[Progress], None] | None = None,
        replace: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """Write the copy. It appears by one rename at the end, or not at all.

        ``destination/distprune/`` has the masks, the report and, as the recipe, which masks were
        applied. All files but the report are the same to the byte for every number of ranks and
        after any interruption. The arguments are those of :func:`prune`.

        Returns:
            What report.json holds: counts of all tensors and of each one.

        Raises:
            CheckpointError: the source or the masks cannot be read, or have changed.
            OutputError: the destination is taken or in use, or the disk is full.
            RanksError: the ranks were called with different arguments, or one was lost.
            Each is raised on every rank that is left. The text says what is left on the disk.

        Cost: one read and one write; some 50 MB of memory per process.
        """
        team = Team(communicator or world(), progress)
        target = resolve_destination(destination)
        _compare(team, target, [("plan", self.digest)])
        task = Task(
            checkpoint=self.checkpoint,
            digest=self.digest,
            tensors=self.entries,
            copied=self.checkpoint.others,
            replaces=replace,
            inputs=[self.masks.path],
        )
        pieces = masked_pieces(self.entries, self.masks)
        text = make_result(team, task, target, lambda: pieces, self._complete, tell)
        report: dict[str, Any] = json.loads(text)
        return report

    def _complete(self, records: Sequence[Record], run: RunFacts) -> dict[str, bytes]:
        """The report and, as the recipe, which masks were applied."""
        path, (size, mtime_ns, header_crc) = self.masks.path, self.masks.state
        check_unchanged(self._folder, [OtherFile(MASK_FILE, path, size, mtime_ns, 0)])
        num_pruned, num_zeroed = (summed(records, what) for what in ("pruned", "zeroed"))
        tensors = [
            {
                "name": entry.name,
                "num_elements": entry.numel,
                "num_pruned": num_pruned[position],
                "num_zeroed": num_zeroed[position],
            }
            for position, entry in enumerate(self.entries)
        ]
        masks = {"folder": self._folder, "header_crc32": header_crc}
        report = {
            "schema": 1,
            "status": "complete",
            "kind": "apply",
            "digest": self.digest,
            "masks": masks,
            "num_elements": sum(entry.numel for entry in self.entries),
            "num_pruned": num_pruned.total(),
            "num_zeroed": num_zeroed.total(),
            "tensors": tensors,
            "source": identity_of(self.checkpoint),
            "copied": [other.name for other in self.checkpoint.others],
            "skipped": self.checkpoint.skipped,
            "run": asdict(run),
        }
        recipe = f"kind: apply\nmasks: {json.dumps(masks)}\n"  # JSON is YAML
        return {REPORT_FILE: as_json(report), RECIPE_FILE: recipe.encode()}
