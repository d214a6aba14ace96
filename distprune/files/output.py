"""The folder of an unfinished result, which one rename makes the destination.

    DST.partial.lock          held with ``flock`` by the run that is at work
    DST.partial/              files of the result
        a.safetensors           finished: it gets its name when all its bytes are on the disk
        b.safetensors.part      was being written when a run was killed; it is begun again
        distprune/work/         the digest of the task, what was prepared for it, and of each
                                weight file what was counted and its masks
    DST.partial-replaced/     the result that was at DST, while it is replaced

Only the first rank uses :class:`Output`, except for the names of its folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distprune.files.checkpoints.checkpoint import SIDECAR
from distprune.files.disk.access import sync_folder, write_atomically, writing
from distprune.files.errors import OutputError
from distprune.files.reports import REPORT_FILE
from distprune.files.text import format_size, printable

DISCARD_HINT = "add --discard to that command to remove it"
_DIGEST, _PREPARED = "digest", "prepared.json"


def resolve_destination(destination: str | Path) -> Path:
    """The absolute path of a result.

    Raises:
        OutputError: it has no name (as ``/``), or its parent is not a folder.
    """
    try:
        path = Path(os.path.abspath(destination))
        os.stat(path.parent)
    except FileNotFoundError:
        parent = printable(str(path.parent))
        raise OutputError(f"{parent} is not a folder; create it first.") from None
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"{printable(str(destination))} cannot be created: {reason}.") from error
    if not path.name:
        raise OutputError(f"{printable(str(path))} has no name; expected that of a new folder.")
    return path


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder."""
    with writing(folder):
        disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def check_free_bytes(folder: Path, num_needed: int, destination: Path) -> None:
    """Raise OutputError if a folder's file system has fewer free bytes than are needed.

    Args:
        folder: an existing one.
        num_needed: bytes, in addition to those that are on the disk.
        destination: named in the message.
    """
    num_free = free_bytes(folder)
    if num_needed > num_free:
        raise OutputError(
            f"{destination} needs {num_needed:,} more bytes, but {num_free:,} are free there. "
            "Make room and run the same command again, or choose another destination."
        )


def folder_bytes(folder: Path) -> int:
    """Bytes of the files of a folder; files that cannot be read count as 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


@contextlib.contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Be the only run that works on a destination, until the context or the process ends.

    A file system without ``flock`` locks nothing.

    Raises:
        OutputError: another run is at work there, or the lock file cannot be written.
    """
    path = f"{destination}.partial.lock"
    with writing(path):
        descriptor = _lock(path, destination)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _lock(path: str, destination: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise OutputError(
                f"another process is at work on {destination}: it holds {path}. Wait for it, or "
                "end it."
            ) from None
        except OSError:
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # its last owner has removed the file meanwhile


def partial_folders(destination: Path) -> list[Path]:
    """The folders of unfinished results of a destination, whichever command made them."""
    of_text = r"(\.partial-text-[0-9]+)?"
    pattern = re.compile(
        re.escape(destination.name) + of_text + r"\.partial(-save|-text(-[0-9]+)?)?"
    )
    with writing(destination.parent):
        names = sorted(os.listdir(destination.parent))
    return [destination.with_name(name) for name in names if pattern.fullmatch(name)]


def discard(destination: str | Path) -> list[tuple[str, int]]:
    """Remove the unfinished results of a destination; the destination itself stays.

    Returns:
        (path, bytes) of each folder that was removed.

    Raises:
        OutputError: a run is at work there, or a folder cannot be removed.
    """
    target = resolve_destination(destination)
    if not partial_folders(target) and not _replaced(target).exists():
        return []
    with locked(target):
        settle(target)
        removed = [(str(folder), folder_bytes(folder)) for folder in partial_folders(target)]
        for folder, _ in removed:
            with writing(folder):
                shutil.rmtree(folder)
    return removed


def check_place(source: str, destination: Path) -> None:
    """Raise OutputError if the destination is inside the source."""
    target, root = Path(os.path.realpath(destination)), Path(os.path.realpath(source))
    if target == root or root in target.parents:
        raise OutputError(
            f"{destination} is inside the source {source}; expected a path outside of it."
        )


def check_taken(
    destination: Path, *, replaces: bool | None = False, inputs: Iterable[str | Path] = ()
) -> None:
    """Raise OutputError if the destination exists, and may not be replaced.

    Args:
        replaces: whether a finished result is to be replaced; None: the command cannot do that.
        inputs: files that the new result is made from; none may be in the old one.
    """
    if not os.path.lexists(destination):
        return
    known = _files_of_result(destination)
    if not replaces:
        state = "holds a finished result of distprune" if known else "exists"
        way = "Delete it, or choose another destination."
        if known and replaces is not None:
            way = "Add --force to replace it, or choose another destination."
        raise OutputError(f"{destination} {state}; expected a new name. {way}")
    if known is None or destination.is_symlink():
        raise OutputError(
            f"{destination} is no finished result of distprune; --force replaces nothing else. "
            "Delete it, or choose another destination."
        )
    place = Path(os.path.realpath(destination))
    for path in inputs:
        if place in Path(os.path.realpath(path)).parents:
            raise OutputError(
                f"{path} is in {destination}, which --force would replace; expected inputs "
                "outside of it. Choose another destination."
            )
    for folder, _, names in os.walk(destination):
        for name in names:
            inside = os.path.relpath(os.path.join(folder, name), destination)
            if inside not in known and Path(inside).parts[0] != SIDECAR:
                raise OutputError(
                    f"{destination / inside} was not written by distprune, and --force would "
                    "remove it. Move it elsewhere, or choose another destination."
                )


def _files_of_result(destination: Path) -> set[str] | None:
    """What stands beside ``distprune/`` by the report; None of what is no finished result."""
    try:
        report: Any = json.loads((destination / REPORT_FILE).read_text())
        if report["status"] != "complete" or not isinstance(report["digest"], str):
            return None
        return {*report["source"], *report["copied"], "README.md"}
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _replaced(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}.partial-replaced")


def settle(destination: Path) -> None:
    """Put a result back that was moved aside, or remove it if the new one is in its place.

    A run that was killed while it replaced a result leaves one. Call it with the lock.
    """
    old = _replaced(destination)
    with writing(destination):
        if not destination.exists() and old.exists():
            os.rename(old, destination)
        shutil.rmtree(old, ignore_errors=True)


def put(folder: Path, destination: Path, *, replaces: bool = False) -> None:
    """Rename a complete result to the destination.

    Args:
        replaces: whether it takes the place of the result that is there, if one is.
    """
    old = _replaced(destination)
    with writing(destination):
        for inner, _, _ in os.walk(folder):
            sync_folder(inner)
        if replaces and destination.exists():
            os.rename(destination, old)
        try:
            os.rename(folder, destination)
        except OSError:
            if old.exists():
                os.rename(old, destination)
            raise
        sync_folder(destination.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def new_folder(destination: Path, num_bytes: int) -> Iterator[Path]:
    """A folder that gets the destination's name when the context ends.

    Args:
        destination: absolute; must not exist.
        num_bytes: that the disk needs.

    Raises:
        OutputError: the destination exists or is in use, or the disk is full. After any exception
            the unfinished folder is removed.
    """
    folder = destination.with_name(f"{destination.name}.partial-save")
    with locked(destination):
        check_taken(destination, replaces=None)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        try:
            with writing(folder):
                folder.mkdir()
            check_free_bytes(folder, num_bytes, destination)
            yield folder
            check_taken(destination, replaces=None)
            put(folder, destination)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class Output:
    """The result of a task while it is made: see the head of this module.

    Args:
        destination: absolute.
        digest: of everything that decides the result.
        sizes: of the files that are made of the source, by name.
        replaces: whether it takes the place of a finished result at the destination.
        inputs: the files that it is made from.

    Attributes:
        folder: of the unfinished result.
        work: the folder in it of what later runs need.
        is_open: whether the folder belongs to this task.
    """

    def __init__(
        self,
        destination: Path,
        digest: str,
        sizes: Mapping[str, int],
        *,
        replaces: bool,
        inputs: Iterable[str | Path],
    ) -> None:
        self.destination = destination
        self.folder = destination.with_name(f"{destination.name}.partial")
        self.work = self.folder / SIDECAR / "work"
        self.is_open = False
        self._digest = digest
        self._sizes = sizes
        self._replaces = replaces
        self._inputs = list(inputs)
        self._lock = contextlib.ExitStack()

    def start(self) -> dict[str, Any]:
        """Acquire the lock, and find what earlier runs have done.

        Returns:
            A value of JSON. ``text``: of the report if the destination is the result of this task,
            else None. In the latter case also ``prepared``, what :meth:`keep` has kept, or None;
            and ``done``, the names of the finished files.

        Raises:
            OutputError: the destination exists or is in use, the unfinished result of another task
                is there, or the disk has too few free bytes.
        """
        text = self._text()
        if text is not None:
            self._remove_remains()
            return {"text": text}
        self._check_taken()
        self._lock.enter_context(locked(self.destination))
        settle(self.destination)
        self._check_taken()
        self._open()
        done = self._done()
        missing = sum(size for name, size in self._sizes.items() if name not in done)
        check_free_bytes(self.folder, missing, self.destination)
        prepared = None
        with contextlib.suppress(FileNotFoundError):
            prepared = json.loads((self.work / _PREPARED).read_text())
        return {"text": None, "prepared": prepared, "done": done}

    def keep(self, value: Any) -> None:
        """Keep a JSON value that all files need, for later runs."""
        write_atomically(self.work / _PREPARED, json.dumps(value).encode())

    def publish(self) -> None:
        """Rename the folder to the destination.

        Raises:
            OutputError: the destination exists by now, or cannot be written.
        """
        self._check_taken()
        put(self.folder, self.destination, replaces=self._replaces)
        self.is_open = False
        shutil.rmtree(self.destination / SIDECAR / "work", ignore_errors=True)

    def discard(self, *, only_if_empty: bool = False) -> None:
        """Remove the folder.

        Args:
            only_if_empty: keep it if a file is finished, or something was prepared.
        """
        is_kept = only_if_empty and (self._done() or (self.work / _PREPARED).exists())
        if self.is_open and not is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)

    def left(self) -> str:
        """A sentence on what is on the disk after a stop, and what to do with it."""
        if not self.folder.is_dir():
            return "Nothing was left on the disk."
        done = self._done()
        num_bytes = sum(self._sizes[name] for name in done)
        return (
            f"{self.folder} keeps {len(done)} of {len(self._sizes)} files, "
            f"{format_size(num_bytes)} of {format_size(sum(self._sizes.values()))}: run the same "
            f"command again to resume, or {DISCARD_HINT}."
        )

    def release(self) -> None:
        """Release the lock."""
        self._lock.close()

    def _done(self) -> list[str]:
        return [name for name in self._sizes if (self.folder / name).exists()]

    def _text(self) -> str | None:
        """The text of the report if the destination is this task's result."""
        try:
            text = (self.destination / REPORT_FILE).read_text()
            report = json.loads(text)
            is_ours = (report["status"], report["digest"]) == ("complete", self._digest)
            actual = {n: os.stat(self.destination / n).st_size for n in self._sizes}
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        return text if is_ours and actual == self._sizes else None

    def _remove_remains(self) -> None:
        """Remove what a run has left that was killed after its last rename."""
        work = self.destination / SIDECAR / "work"
        remains = [work, _replaced(self.destination), Path(f"{self.destination}.partial.lock")]
        if any(path.exists() for path in remains):
            with contextlib.suppress(OutputError), locked(self.destination):
                settle(self.destination)
                shutil.rmtree(work, ignore_errors=True)

    def _check_taken(self) -> None:
        check_taken(self.destination, replaces=self._replaces, inputs=self._inputs)

    def _open(self) -> None:
        digest = self.work / _DIGEST
        with writing(self.folder):
            self.work.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if digest.read_text() != self._digest:
                raise OutputError(
                    f"{self.folder} is the unfinished result of another recipe or source, or the "
                    "source has changed since. Finish it with the command that began it, "
                    f"{DISCARD_HINT}, or choose another destination."
                )
        self.is_open = True
        write_atomically(digest, self._digest.encode())
