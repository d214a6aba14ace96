"""One run at a time on a destination, on file systems with ``flock`` and on those without.

[Note: lock] A lock file beside the destination names its owner: host, boot id, pid, and a token
that is drawn for each run. The owner also holds ``flock`` on the file where the file system has it,
and rewrites the file every ten seconds: its heartbeat.

- The system releases ``flock`` when a process ends, however it ends. A file that another process
  holds is in use; a file that nobody holds and that a process of this machine wrote is free.
- Some file systems have no ``flock`` (ENOLCK, ENOSYS or EOPNOTSUPP), and some have it for one
  machine only. There an owner on this machine has ended when no process has its pid. Any other
  owner counts as ended when its heartbeat is two minutes old. Both times come from the file system,
  so the clocks of the machines do not matter.
- An owner that finds another token in the file stops. If two runs take over the same lock at the
  same time, one of them stops; until then both write the same bytes.

The ``filelock`` package does not serve here: its native lock raises on ENOLCK and EOPNOTSUPP, its
leases make each later run wait until a lease has expired, and neither lets a user take over.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Literal

from distprune.files.disk.access import WRITE, check_own_file, check_owner, writing
from distprune.files.disk.lock_owner import NUM_BYTES, Owner
from distprune.files.errors import OutputError

_BEAT_SECONDS = 10.0
_STALE_SECONDS = 120.0
# Without flock, an owner waits so long after it signed, to see whether another one signed as well.
_SETTLE_SECONDS = 0.2
_tokens: set[object] = set()  # of the locks that this process owns


class Lock:
    """One run at a time on a destination.

    Args:
        destination: absolute.

    Attributes:
        path: of the lock file.
    """

    def __init__(self, destination: Path) -> None:
        self.path = f"{destination}.partial.lock"
        self._descriptor: int | None = None
        self._owner = Owner()
        self._is_released = threading.Event()
        self._heart: threading.Thread | None = None
        self._error: OutputError | None = None

    def acquire(self, take_over: bool = False) -> None:
        """Become the owner.

        Args:
            take_over: replace an owner on another machine even if its heartbeat is recent.

        Raises:
            OutputError: another run is the owner, or may be; the path is a link or another user's
                file; or it cannot be written.
        """
        while (descriptor := self._try_acquire(take_over)) is None:
            pass
        self._descriptor = descriptor
        _tokens.add(self._owner.token)
        self._is_released.clear()
        self._heart = threading.Thread(target=self._beat, args=(descriptor,), daemon=True)
        self._heart.start()

    def check(self) -> None:
        """Raise OutputError if a heartbeat found another owner. Cheap: call it often."""
        if self._error is not None:
            raise self._error

    def confirm(self) -> None:
        """Read the file, and raise OutputError if another run is the owner.

        Call it before steps that cannot be undone.
        """
        if self._descriptor is not None:
            self._read_owner()
        self.check()

    def release(self) -> None:
        """Remove the file if this run is still the owner."""
        if self._descriptor is None:
            return
        self._is_released.set()
        if self._heart is not None:
            self._heart.join(_BEAT_SECONDS)
        self._read_owner()
        if self._error is None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        if self._heart is None or not self._heart.is_alive():  # else it still uses the file
            os.close(self._descriptor)
        self._descriptor, self._error = None, None
        _tokens.discard(self._owner.token)

    def _try_acquire(self, take_over: bool) -> int | None:
        """Become the owner.

        Returns:
            The descriptor of the file, to be kept open; None if another process changed the file
            meanwhile, so that the caller has to try again.
        """
        descriptor, is_new = self._open()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            flock = _try_flock(descriptor)
            if not _is_at(descriptor, self.path):
                return None
            owner = Owner() if is_new else _read(descriptor)
            if flock == "taken":
                if not take_over or owner.is_on_this_machine:
                    raise OutputError(self._in_use(owner, take_over))
                os.unlink(self.path)  # its owner will not find its token again
                return None
            if not is_new and not take_over:
                self._check_ended(owner, flock == "ours", descriptor)
            try:
                self._owner = Owner.this_process()
                self._write(descriptor)
            except OutputError:
                if is_new:
                    os.unlink(self.path)
                raise
            if flock == "unsupported":
                time.sleep(_SETTLE_SECONDS)
                if _read(descriptor).token != self._owner.token:
                    return None
            stack.pop_all()
        return descriptor

    def _open(self) -> tuple[int, bool]:
        """A descriptor of the file, and whether this call created the file."""
        flags = WRITE | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            with writing(self.path), contextlib.suppress(FileExistsError):
                return os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
            try:
                with writing(self.path):
                    check_own_file(self.path, self.path)
                    check_owner(self.path)
                    return os.open(self.path, flags), False
            except OutputError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                # It was removed in between.

    def _check_ended(self, owner: Owner, has_flock: bool, descriptor: int) -> None:
        """Raise OutputError if the owner may still be at work."""
        if has_flock and (not owner.facts or owner.is_on_this_machine):
            return
        if owner.has_ended(_tokens):
            return
        seconds = self._heartbeat_age(descriptor)
        if seconds < _STALE_SECONDS:
            left = round(min(max(_STALE_SECONDS - seconds, 1), _STALE_SECONDS))
            raise OutputError(
                f"{owner} was at work on this destination {max(0, round(seconds))} seconds ago "
                f"({self.path}). If it has ended, run the same command again in {left} seconds, or "
                "at once with --take-over."
            )

    def _in_use(self, owner: Owner, take_over: bool) -> str:
        text = f"{owner} is at work on this destination ({self.path}). Wait for it"
        if not owner.is_on_this_machine:
            return f"{text}; if it has ended, add --take-over."
        more = " A running process is not taken over." if take_over else ""
        return f"{text}, or end it.{more}"

    def _heartbeat_age(self, descriptor: int) -> float:
        """Seconds since the last heartbeat, by the clock of the file system."""
        probe = f"{self.path}.{secrets.token_hex(4)}"
        with writing(probe):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            new = os.open(probe, flags, 0o600)
            try:
                os.write(new, b"?")
                now = os.fstat(new).st_mtime
            finally:
                os.close(new)
                os.unlink(probe)
        return now - os.fstat(descriptor).st_mtime

    def _write(self, descriptor: int) -> None:
        with writing(self.path):
            os.pwrite(descriptor, self._owner.to_bytes(), 0)
            os.ftruncate(descriptor, NUM_BYTES)
            os.fsync(descriptor)

    def _beat(self, descriptor: int) -> None:
        while not self._is_released.wait(_BEAT_SECONDS):
            self._read_owner()
            if self._error is not None:
                return
            # If the file system is full or away for a while, a later heartbeat may succeed.
            with contextlib.suppress(OutputError):
                self._write(descriptor)

    def _read_owner(self) -> None:
        """Set the error if the file names another owner; nothing if it cannot be read now."""
        owner = Owner()
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        except OSError:
            return
        else:
            try:
                owner = Owner.read(descriptor)
            except OSError:
                return
            finally:
                os.close(descriptor)
        if owner.token != self._owner.token:
            self._error = OutputError(
                f"{owner} has taken over or removed {self.path} while this run was at work; this "
                "run stops, and nothing is lost. Let one run at a time work on a destination."
            )


def _try_flock(descriptor: int) -> Literal["ours", "taken", "unsupported"]:
    """Lock the file; "taken" by another process, or "unsupported" by the file system."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_taken = error.errno in (errno.EWOULDBLOCK, errno.EAGAIN)
        return "taken" if is_taken else "unsupported"
    return "ours"


def _read(descriptor: int) -> Owner:
    """The owner that the file names; without facts if it cannot be read."""
    try:
        return Owner.read(descriptor)
    except OSError:
        return Owner()


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
