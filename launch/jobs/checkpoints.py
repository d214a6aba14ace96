"""Checkpoints that are complete or absent: a killed run continues from the last one.

A checkpoint is written into a folder with another name, which rank 0 renames when every rank is
done. Model, masks, optimizer and pruner go through torch.distributed.checkpoint, so any number of
ranks and any wrapping can read what another has written.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from distprune import checkpoint
from distprune.schedule import ScheduledPruner

from .processes import Job

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of one training run, all below one folder that every rank sees.

    Attributes:
        facts: what must not change between writing and reading, such as the seed.
    """

    folder: Path
    facts: dict[str, Any]
    job: Job

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pruner: ScheduledPruner | None,
        events: list[dict[str, Any]],
    ) -> None:
        """Write the state after `step` steps, then remove older ones. Collective.

        Args:
            events: of this run so far, as JSON has them.
        """
        complete = self.folder / f"step-{step:06}"
        partial = self.folder / f"partial-{step:06}"
        if self.job.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save(checkpoint.get_state_dict(model, optimizer, pruner), checkpoint_id=partial)
        if self.job.rank == 0:
            progress = {"step": step, "facts": self.facts, "events": events}
            with (partial / PROGRESS_FILE).open("w") as file:
                json.dump(progress, file)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(complete)
            for older in self.folder.iterdir():
                if older != complete:
                    shutil.rmtree(older)
        dist.barrier()

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, pruner: ScheduledPruner | None
    ) -> tuple[int, list[dict[str, Any]]]:
        """Continue from the last complete checkpoint, if there is one. Collective.

        Returns:
            The step to go on with, counted from 0, and the events so far.

        Raises:
            ValueError: the checkpoint is of a run with other facts; on every rank.
        """
        latest = self._latest()
        if latest is None:
            return 0, []
        progress = json.loads((latest / PROGRESS_FILE).read_text())
        if progress["facts"] != self.facts:
            raise ValueError(
                f"{latest} was written with {progress['facts']}, and this run has {self.facts}; "
                "expected the same. Choose another --output, or remove the folder."
            )
        checkpoint.load(latest, model, optimizer, pruner)
        return progress["step"], progress["events"]

    def _latest(self) -> Path | None:
        """As rank 0 sees it; the same on every rank."""
        # Zeros in front make the order of names that of steps.
        return self.job.of_rank_0(lambda: max(self.folder.glob("step-*"), default=None))
