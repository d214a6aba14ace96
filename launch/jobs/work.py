"""What a job has done so far, in a folder of files: a run that was killed goes on from there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .processes import Job

FACTS = "facts.json"


class Folder:
    """Results that every rank sees, one file each. Collective: all ranks call the same methods.

    Args:
        path: of the folder; made if it does not exist.
        facts: what the results depend on, as JSON has it.

    Raises:
        ValueError: the folder is of a run with other facts; on every rank.
    """

    def __init__(self, path: Path, facts: dict[str, Any], job: Job) -> None:
        self.job = job
        self.path = path
        earlier = self.once(FACTS, lambda: facts)
        if earlier != facts:
            names = [n for n in {**facts, **earlier} if facts.get(n) != earlier.get(n)]
            changes = [f"{n} was {earlier.get(n)!r} and is {facts.get(n)!r}" for n in names]
            raise ValueError(
                f"{path} is of a run with other settings: {'; '.join(changes)}. Expected the same, "
                "or another output folder; remove it to start afresh."
            )

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, as JSON; read from the file of this name if it was made before."""
        file = self.path / name
        found = self.job.of_rank_0(lambda: read_json(file))
        if found is not None:
            return found
        made = make()
        if self.job.rank == 0:
            _write(file, made)
        dist.barrier()
        return json.loads(json.dumps(made))

    def once_folder(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder of this name, which `make` fills on all ranks if it is not there."""
        complete, partial = self.path / name, self.path / f"{name}.partial"
        if self.job.of_rank_0(complete.exists):
            return complete
        if self.job.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
        dist.barrier()
        make(partial)
        dist.barrier()
        if self.job.rank == 0:
            partial.rename(complete)
        dist.barrier()
        return complete

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        if self.job.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
        dist.barrier()


def read_json(file: Path) -> Any:
    """The content of a file; None if it does not exist."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _write(file: Path, value: Any) -> None:
    """Write a file that is complete or absent."""
    partial = file.with_name(f"{file.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(file)
