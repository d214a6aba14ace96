"""Journals of finished units: one line of JSON each, which is ignored if it was changed.

Each line begins with a seal: the first 16 hexadecimal digits of the SHA-256 of the plan's digest
and the rest of the line. A line that was cut off, edited, or belongs to another plan is ignored.
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

# After a kill, the units of at most so many bytes have to be written again.
_FLUSH_BYTES = 1 << 28
_NAME = re.compile(r"done-(\d+)-\d+\.jsonl")


class Journal:
    """The units that one rank finished in one run, each recorded when its bytes are on the disk.

    Args:
        work: the folder of journals.
        digest: of the plan.
        run: number of the run, from :func:`next_run`.
        rank: of this process.
        outputs: files to sync before a line is written.
    """

    def __init__(self, work: Path, digest: str, run: int, rank: int, outputs: OpenFiles) -> None:
        self._path = work / f"done-{run:04d}-{rank:04d}.jsonl"
        self._digest = digest
        self._outputs = outputs
        self._pending: list[str] = []
        self._num_bytes = 0
        self._is_new = True

    def add(self, record: dict[str, Any], num_bytes: int) -> None:
        """Record a finished unit.

        Args:
            record: of the unit, its number under "unit".
            num_bytes: of the unit.

        Raises:
            OutputError: the disk reports an error.
        """
        self._pending.append(sealed(record, self._digest))
        self._num_bytes += num_bytes
        if self._num_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sync the outputs and write the lines, so that they survive a loss of power.

        Raises:
            OutputError: the disk reports an error.
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
    """Whether a name is that of a journal."""
    return _NAME.fullmatch(name) is not None


def read_records(work: Path, digest: str) -> dict[int, dict[str, Any]]:
    """By number of a finished unit, its record by the last run that wrote it."""
    records: dict[int, dict[str, Any]] = {}
    for name in sorted(_journals(work), key=lambda name: (run_of(name), name)):
        for line in read_small(work / name).split(b"\n")[:-1]:
            record = unsealed(line, digest)
            if record is not None:
                records[record["unit"]] = record
    return records


def next_run(work: Path) -> int:
    """The number of a new run: one more than that of the last one."""
    return max((run_of(name) for name in _journals(work)), default=-1) + 1


def run_of(name: str) -> int:
    """The number of the run that wrote a journal; -1 for a name that is not a journal's."""
    match = _NAME.fullmatch(name)
    return -1 if match is None else int(match[1])


def sealed(value: Any, digest: str) -> str:
    """A value as a line: its seal and its JSON."""
    text = json.dumps(value)
    return f"{_seal(text, digest)} {text}"


def unsealed(line: bytes, digest: str) -> Any:
    """The value of a line from :func:`sealed`; None if the line was changed."""
    try:
        seal, _, text = line.decode().strip().partition(" ")
    except UnicodeDecodeError:
        return None
    return json.loads(text) if seal == _seal(text, digest) else None


def _seal(text: str, digest: str) -> str:
    return hashlib.sha256(f"{digest}\n{text}".encode()).hexdigest()[:16]


def _journals(work: Path) -> list[str]:
    return [name for name in os.listdir(work) if is_journal(name)] if work.is_dir() else []
