"""The folder of a pruning with text while it is under way: hidden states, statistics, progress.

    DST.partial-text/
        facts.json              what decides the result; another command's folder is refused
        progress.json           which layers of which pass are done
        states/                 hidden states and gradients; see windows.[Note: stages]
        statistics/             of each layer
        scores/                 of each layer, one for each weight, unless they are kept elsewhere
        values/                 kept weights of each layer that were moved
        polished/               the same after the polishing, whose state is in polish.pt
        own_text.safetensors    windows that the model has written

A step is recorded when its files are written. What a killed run had begun is made again, from files
that no step changes, so that the result does not depend on where it was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from distprune.files import disk
from distprune.files.errors import CheckpointError, OutputError
from distprune.ranks.collectives import Communicator

_FACTS, _PROGRESS = "facts.json", "progress.json"


def digest_of(facts: Any) -> str:
    """A hash of what decides a result, as JSON."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class Work:
    """The folder; every rank sees it. The first rank changes what is not a rank's own.

    Args:
        destination: absolute.
        facts: what decides the result, as JSON.
        communicator: of the ranks.
        scores: gets the scores of single weights, and stays; None: they are in the folder.

    Attributes:
        path: of the folder.
        scores: where the scores of single weights are.
        communicator: of the ranks.
    """

    def __init__(
        self,
        destination: Path,
        facts: Mapping[str, Any],
        communicator: Communicator,
        scores: Path | None = None,
    ) -> None:
        self._destination = destination
        self.path = destination.with_name(f"{destination.name}.partial-text")
        self.scores = scores or self.folder("scores")
        self.communicator, self._done = communicator, dict[str, Any]()
        self._text = json.dumps({**facts, "scores": scores and str(scores)}, indent=1) + "\n"

    def check(self) -> None:
        """Raise OutputError if another command has begun the destination. Local."""
        path = self.path
        if (path / _FACTS).exists():
            is_other = (path / _FACTS).read_text() != self._text
        else:  # one without text
            path = path.with_name(path.name.removesuffix("-text"))
            is_other = (path / disk.WORK / "digest").exists()
        if is_other:
            raise OutputError(
                f"{path} is the unfinished result of another command, text, model or version. "
                f"Finish it with the command that began it, {disk.DISCARD_HINT}, or choose another "
                "destination."
            )
        if not (self.path / _FACTS).exists() and self.scores.exists():
            raise OutputError(
                f"{self.scores} exists already; expected a free name for the scores. Remove it, or "
                "choose another."
            )

    @contextlib.contextmanager
    def begun(self, num_bytes: int, tell: Callable[[str], None]) -> Iterator[None]:
        """Make the folder, and lock the destination; an error inside is raised on every rank.

        Collective.

        Args:
            num_bytes: that the folder takes in the end.
            tell: is told if an earlier run has begun it.

        Raises:
            OutputError: as :meth:`check`, or the disk has too few free bytes; on every rank.
        """
        ranks = self.communicator
        with contextlib.ExitStack() as lock:
            first_rank = contextlib.nullcontext() if ranks.index else disk.locked(self._destination)
            ranks.run(partial(lock.enter_context, first_rank))
            if ranks.run((self.path / _FACTS).exists):
                tell(f"Resuming what is in {self.path}.")
            self.on_first_rank(partial(self._make, num_bytes))
            # Different where the folder is not one that all ranks see.
            self._done = ranks.run(
                lambda: _progress_in(self.path / _PROGRESS),
                lambda done: [(f"progress in {self.path}", json.dumps(done))],
            )
            with ranks.raising_everywhere():
                yield

    def folder(self, name: str) -> Path:
        """One of the folders in it."""
        return self.path / name

    def file(self, name: str, number: int) -> Path:
        """The safetensors file of a layer in one of the folders."""
        return self.folder(name) / f"{number:05}.safetensors"

    def get(self, step: str, default: Any = None) -> Any:
        """What was recorded of a step."""
        return self._done.get(step, default)

    def on_first_rank(self, step: Callable[[], object]) -> None:
        """Run a step that changes the folder; an error is raised on every rank. Collective."""
        self.communicator.run(lambda: None if self.communicator.index else step())

    def record(self, step: str, value: Any) -> None:
        """Record a step that all ranks have done. Collective.

        Args:
            value: JSON; the same on every rank.
        """
        self._done[step] = value
        text = json.dumps(self._done).encode()
        self.communicator.agree()  # every rank has written its files
        self.on_first_rank(lambda: disk.write_atomically(self.path / _PROGRESS, text))

    def once(self, step: str, run: Callable[[], Any]) -> Any:
        """What a step gives, as JSON; it runs unless an earlier run has done it. Collective."""
        if step not in self._done:
            self.record(step, run())
        return self._done[step]

    def forget(self) -> None:
        """Let the next run do all steps again, because this rank finds a file damaged. Local."""
        disk.write_atomically(self.path / _PROGRESS, b"{}")

    def remove(self) -> None:
        """Remove the folder. Collective."""
        self.communicator.agree()
        self.on_first_rank(lambda: shutil.rmtree(self.path, ignore_errors=True))

    def _make(self, num_bytes: int) -> None:
        self.check()
        with disk.writing(self.path):
            for name in ("states", "statistics", "values", "polished"):
                self.folder(name).mkdir(mode=0o700, parents=True, exist_ok=True)
        disk.check_free_bytes(self.path, num_bytes - disk.folder_bytes(self.path), self.path)
        disk.write_atomically(self.path / _FACTS, self._text.encode())
        with disk.writing(self.scores):
            self.scores.mkdir(parents=True, exist_ok=True)


def _progress_in(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        path.unlink(missing_ok=True)
        raise damaged(path, error) from error


def damaged(path: Path, error: object) -> CheckpointError:
    """The error for a file of the folder that is missing or damaged."""
    return CheckpointError(
        f"{path} is missing or damaged: {error}. Run the same command again: it makes its "
        "files anew."
    )
