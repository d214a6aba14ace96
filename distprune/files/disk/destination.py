"""The path of a result: its unfinished folders, the free bytes of its disk, and its lock.

[Note: lock] The owner holds ``flock`` on the file, and removes the file when it ends. The system
releases ``flock`` when a process ends, however it ends: a file that this machine wrote and that
nobody holds is free. Some file systems have no ``flock``, and some have it for one machine only, so
a file that may be another machine's is refused, and so is any file where ``flock`` fails. A user
who knows that its owner has ended removes it. An owner that does not find its own text in the file
stops before it publishes anything.

The ``filelock`` package does not serve here: its native lock raises where ``flock`` fails, and its
leases make each later run wait until a lease has expired.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from distprune.files.disk import access
from distprune.files.disk.access import WRITE, writing
from distprune.files.errors import OutputError
from distprune.files.text import printable

# Added to the name of an unfinished result: ".partial-", sixteen digits, and a suffix.
_LONGEST_SUFFIX = 30
_MAX_NAME = 255  # bytes; for file systems that do not report it


def resolve_destination(destination: str | Path) -> Path:
    """The absolute path of a result.

    Raises:
        OutputError: it has no name (as ``/``), its name is too long to add a suffix, or its parent
            is not a folder.
    """
    try:
        path = Path(os.path.abspath(destination))
        shown = printable(str(path))
        if not path.name:
            raise OutputError(f"{shown} has no name; expected that of a new folder.")
        if "\0" in path.name:
            raise ValueError("its name has a NUL byte")
        os.stat(path.parent)
    except FileNotFoundError:
        raise OutputError(
            f"{printable(str(path.parent))} is not a folder; create it first."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"{printable(str(destination))} cannot be created: {reason}.") from error
    length, limit = len(os.fsencode(path.name)), _MAX_NAME
    with contextlib.suppress(OSError, ValueError):
        limit = os.pathconf(path.parent, "PC_NAME_MAX")
    if length + _LONGEST_SUFFIX > limit:
        raise OutputError(
            f"the name of {shown} has {length} bytes; expected at most {limit - _LONGEST_SUFFIX}: "
            f"the file system allows {limit}, and '.partial-' with a number is added at first."
        )
    return path


def partial_folders(destination: Path) -> list[Path]:
    """The folders of unfinished results of a destination, whichever command made them."""
    name = re.escape(destination.name) + r"(\.partial-text-[0-9]+)?"
    pattern = re.compile(name + r"\.partial-([0-9a-f]{16}(\.work)?|apply|save|text(-[0-9]+)?)")
    with writing(destination.parent):
        names = sorted(os.listdir(destination.parent))
    return [destination.with_name(name) for name in names if pattern.fullmatch(name)]


_BLOCK = 512  # bytes; the unit of st_blocks


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the file system of a folder.

    Raises:
        OutputError: the file system does not say.
    """
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


def missing_bytes(path: Path, size: int) -> int:
    """Bytes that the file system has not yet allocated of a file that will have this size."""
    return max(size - path.stat().st_blocks * _BLOCK, 0) if path.exists() else size


def folder_bytes(folder: Path) -> int:
    """Bytes that the files of a folder take on the disk; files that cannot be read count as 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * _BLOCK
    return total


class Lock:
    """One run at a time on a destination.

    Args:
        destination: absolute.

    Attributes:
        path: the path of the lock file.
    """

    def __init__(self, destination: Path) -> None:
        self.path = f"{destination}.partial.lock"
        self._descriptor: int | None = None
        self._text = b""

    def acquire(self) -> None:
        """Become the owner.

        Raises:
            OutputError: another run is the owner, or may be; the path is a link or another user's
                file; or it cannot be written.
        """
        while self._descriptor is None:
            with contextlib.ExitStack() as stack:
                descriptor, is_new = self._open()
                stack.callback(os.close, descriptor)
                flock = _try_flock(descriptor)
                if not _is_at(descriptor, self.path):
                    continue  # another process replaced the file meanwhile
                if is_new and flock != "taken":
                    self._sign(descriptor)
                    self._descriptor = descriptor
                    stack.pop_all()
                elif not is_new:
                    self._check_free(flock)
                    with writing(self.path), contextlib.suppress(FileNotFoundError):
                        os.unlink(self.path)

    def check(self) -> None:
        """Raise OutputError if the file is not this run's any more. Cost: one read of a small file.

        Call it before steps that cannot be undone. A file that cannot be read for a while is not
        lost.
        """
        if self._descriptor is None:
            return
        try:
            text = access.read_small(self.path)
        except FileNotFoundError:
            text = b""
        except OSError:
            return
        if text != self._text:
            raise OutputError(
                f"{_named(_parsed(text))} has replaced or removed {self.path} while this run was "
                "at work; this run stops, and nothing is lost. Let one run at a time work on a "
                "destination."
            )

    def release(self) -> None:
        """Remove the file if this run is still the owner."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError, OutputError):
            self.check()
            os.unlink(self.path)
        os.close(self._descriptor)
        self._descriptor = None

    def _open(self) -> tuple[int, bool]:
        """A descriptor of the file, and whether this call created the file."""
        flags = WRITE | os.O_NONBLOCK | os.O_CLOEXEC
        with writing(self.path), contextlib.suppress(FileExistsError):
            return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        with writing(self.path), contextlib.suppress(FileNotFoundError):
            access.check_own_file(self.path, self.path)
            access.check_owner(self.path)
            return os.open(self.path, flags), False
        return self._open()  # it was removed in between

    def _sign(self, descriptor: int) -> None:
        """Write who holds the lock; the token tells two runs of one process apart."""
        facts = {
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "pid": os.getpid(),
            "since": datetime.now(timezone.utc).isoformat(" ", "seconds"),
            "token": secrets.token_hex(8),
        }
        self._text = json.dumps(facts).encode() + b"\n"
        try:
            with writing(self.path):
                access.write_all(descriptor, self._text)
                os.fsync(descriptor)
        except OutputError:
            os.unlink(self.path)
            raise

    def _check_free(self, flock: Literal["ours", "taken", "fails"]) -> None:
        """Raise OutputError if the owner that the file names may still be at work."""
        facts: dict[str, Any] = {}
        with contextlib.suppress(OSError):
            facts = _parsed(access.read_small(self.path))
        is_here = _is_on_this_machine(facts)
        if flock == "ours" and (is_here or not facts):
            return
        is_running = flock == "taken" and is_here
        state, hint = "was", "; if it has ended, remove it"
        if is_running:
            state, hint = "is", ", or end it"
        raise OutputError(
            f"{_named(facts)} {state} at work on this destination, as {self.path} says. Wait for "
            f"it{hint}."
        )


def _try_flock(descriptor: int) -> Literal["ours", "taken", "fails"]:
    """Lock the file: "taken" by another process, or "fails" on this file system."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "taken" if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN) else "fails"
    return "ours"


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _parsed(text: bytes) -> dict[str, Any]:
    """What a lock file says; empty if it is damaged, since anybody may have written it."""
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_on_this_machine(facts: dict[str, Any]) -> bool:
    """Whether an owner ran on this machine; containers have hosts of their own, and one boot id."""
    same_boot = "boot" in facts and facts["boot"] == _boot_id()
    return same_boot or facts.get("host") == socket.gethostname()


def _named(facts: dict[str, Any]) -> str:
    """The owner of a lock for a message; what the file says may be of any type and length."""
    if "pid" not in facts:
        return "another process"
    keys = ("pid", "host", "since")
    pid, host, since = (ascii(str(facts.get(key, "")))[1:-1][:64] for key in keys)
    return f"process {pid} on {host}" + (f" (since {since})" if since else "")


def _boot_id() -> str:
    """A number that the machine draws when it starts; the host's name where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
