"""``apply``: existing masks on another checkpoint, a copy with zeros where the masks are zero."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distprune.base.float_formats import PLAIN_FLOATS
from distprune.files.checkpoints.checkpoint import Checkpoint, OtherFile, open_checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.checkpoints.mask_files import MASK_FILE, MaskFile, mask_layout, open_masks
from distprune.files.errors import CheckpointError
from distprune.files.output import resolve_destination
from distprune.files.planning import source_facts
from distprune.files.reports import Record, RunFacts, as_json, identity_of, summed
from distprune.files.results import Completed, Task, check_unchanged, make_result, versions
from distprune.files.rewriting import masked_pieces
from distprune.files.team import Progress, Team
from distprune.ranks.collectives import Communicator
from distprune.ranks.process_groups import world

_VERSION = 1  # raised when the same masks and source would give other bytes


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
        after any interruption. The arguments are those of
        :func:`distprune.files.pruning.prune`.

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
        team.compare(
            [("destination", ascii(str(target))), *versions().items(), ("plan", self.digest)]
        )
        shapes = {entry.name: entry.shape for entry in self.entries}
        task = Task(
            checkpoint=self.checkpoint,
            digest=self.digest,
            tensors=self.entries,
            layout=mask_layout(shapes, self.checkpoint.files),
            copied=self.checkpoint.others,
            replaces=replace,
            inputs=[self.masks.path],
        )
        pieces = masked_pieces(self.entries, self.masks)
        text = make_result(team, task, target, lambda: pieces, self._complete, tell)
        report: dict[str, Any] = json.loads(text)
        return report

    def _complete(self, records: Sequence[Record], run: RunFacts) -> Completed:
        """The report and, as the recipe, which masks were applied."""
        path, (size, mtime_ns, header_crc) = self.masks.path, self.masks.state
        check_unchanged(self._folder, [OtherFile(MASK_FILE, path, size, mtime_ns, 0)])
        recipe = (
            "# What `distprune apply` was given.\n"
            "kind: apply\n"
            f"masks: {json.dumps(self._folder)}\n"
            f"masks_header_crc32: {header_crc}\n"
        )
        num_pruned, num_zeroed = (summed(records, what) for what in ("pruned", "zeroed"))
        tensors = [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": entry.shape,
                "file": entry.file,
                "num_elements": entry.numel,
                "num_pruned": num_pruned[position],
                "num_zeroed": num_zeroed[position],
            }
            for position, entry in enumerate(self.entries)
        ]
        report = {
            "schema": 1,
            "status": "complete",
            "kind": "apply",
            "digest": self.digest,
            "masks": {"folder": self._folder, "header_crc32": header_crc},
            "num_elements": sum(entry.numel for entry in self.entries),
            "num_pruned": num_pruned.total(),
            "num_zeroed": num_zeroed.total(),
            "tensors": tensors,
            "source": identity_of(self.checkpoint),
            "copied": [other.name for other in self.checkpoint.others],
            "skipped": self.checkpoint.skipped,
            "run": asdict(run),
        }
        return as_json(report), recipe.encode(), {}
