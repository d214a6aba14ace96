"""What is done, in lines that are believed only as they were written.

Each line begins with a seal: the first 16 hexadecimal digits of the SHA-256 of the plan's digest
and the rest of the line. A line that was cut off, edited, or belongs to another plan is no line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from distprune.files.disk.access import read_small, write_all, writing
from distprune.files.disk.open_files import OpenFiles

# How much may have to be done again after a kill.
_FLUSH_BYTES = 1 << 28
_NAME = re.compile(r"done-(\d+)-\d+\.jsonl")


class Journal:
    """What one rank has done in one run: a line for each unit, written once its bytes are safe.

    Args:
        work: the folder for it.
        digest: of the plan.
        run: number of the run, a new one each time.
        rank: this rank's.
        outputs: what to sync first.
    """

    def __init__(self, work: Path, digest: str, run: int, rank: int, outputs: OpenFiles) -> None:
        self._path = work / f"done-{run:04d}-{rank:04d}.jsonl"
        self._digest = digest
        self._outputs = outputs
        self._pending: list[str] = []
        self._num_bytes = 0
        self._is_new = True

    def add(self, record: dict[str, Any], num_bytes: int) -> None:
        """A unit is done."""
        self._pending.append(sealed(record, self._digest))
        self._num_bytes += num_bytes
        if self._num_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Make all that was added survive a loss of power.

        Raises:
            OutputError: the disk could not take it.
        """
        if not self._pending:
            return
        self._outputs.sync()
        lines = "".join(line + "\n" for line in self._pending).encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        if self._is_new:
            flags |= os.O_CREAT | os.O_EXCL
        with writing(self._path):
            descriptor = os.open(self._path, flags, 0o600)
            self._is_new = False
            try:
                write_all(descriptor, lines)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._pending, self._num_bytes = [], 0


def is_journal(name: str) -> bool:
    """Whether a file in the folder of journals is one, by its name."""
    return _NAME.fullmatch(name) is not None


def read_records(work: Path, digest: str) -> dict[int, dict[str, Any]]:
    """Of all units that are done, by number: what the last run that did them noted."""
    found: dict[int, dict[str, Any]] = {}
    for _, name in sorted((run_of(name), name) for name in _journals(work)):
        for line in read_small(work / name).split(b"\n")[:-1]:
            record = unsealed(line, digest)
            if record is not None:
                found[record["unit"]] = record
    return found


def next_run(work: Path) -> int:
    """A number that no run before this one had."""
    return max((run_of(name) for name in _journals(work)), default=-1) + 1


def run_of(name: str) -> int:
    match = _NAME.fullmatch(name)
    return -1 if match is None else int(match[1])


def sealed(value: Any, digest: str) -> str:
    """JSON in one line, behind its seal."""
    text = json.dumps(value)
    return f"{_seal(text, digest)} {text}"


def unsealed(line: bytes, digest: str) -> Any:
    """What was sealed; None if the line is not as it was written."""
    try:
        seal, _, text = line.decode().strip().partition(" ")
    except UnicodeDecodeError:
        return None
    return json.loads(text) if seal == _seal(text, digest) else None


def _seal(text: str, digest: str) -> str:
    return hashlib.sha256(f"{digest}\n{text}".encode()).hexdigest()[:16]


def _journals(work: Path) -> list[str]:
    return [name for name in os.listdir(work) if is_journal(name)] if work.is_dir() else []
