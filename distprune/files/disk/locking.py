"""One run at a time on a destination, on file systems with ``flock`` and on those without.

[Note: lock] A file beside the destination names its owner: the machine since it was started (its
boot id), the process, and a token that is drawn anew for each run. The owner also holds ``flock``
on the file where the file system has it, and writes to the file every ten seconds: its heartbeat.

- The system unlocks ``flock`` when a process ends, however it ends. So what another process holds
  is in use, and what none holds and a process of this machine left is free.
- Some file systems have no ``flock`` (it answers ENOLCK, ENOSYS or EOPNOTSUPP), and some have it
  for one machine only. There an owner on this machine is gone when no process has its number. Any
  other one, as on another machine or before the last start of this one, counts as gone when its
  heartbeat is two minutes old. The age is the difference of two times of the same file system, so
  that the clocks of the machines do not matter.
- An owner that finds another token in the file stops. So even if two runs should take over the same
  lock at the same time, one of them ends; until then both write the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

from distprune.files.disk.access import WRITE, check_own_file, check_owner, writing
from distprune.files.errors import OutputError

_BEAT_SECONDS = 10.0
_STALE_SECONDS = 120.0
# After an owner without flock has signed the file: a second one that did so too is seen then.
_SETTLE_SECONDS = 0.2
_LOCK_BYTES = 1024  # of the file, whatever it says: it is written over in one piece
_HELD = {errno.EWOULDBLOCK, errno.EAGAIN}
_tokens: set[str] = set()  # of the locks that this process owns


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
        self._owner: dict[str, Any] = {}
        self._done = threading.Event()
        self._beating: threading.Thread | None = None
        self._error: OutputError | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def acquire(self, take_over: bool = False) -> None:
        """Become the owner.

        Args:
            take_over: do not wait until the heartbeat of an owner that cannot be asked is old.

        Raises:
            OutputError: another run is the owner, or may be; the path is a link, or no file of
                this user; or it cannot be written.
        """
        while not self._try(take_over):
            pass
        self._done.clear()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def check(self) -> None:
        """Raises OutputError if another run has become the owner; cheap, asked often."""
        if self._error is not None:
            raise self._error

    def confirm(self) -> None:
        """As :meth:`check`, but looks at the file: before what cannot be undone."""
        if self._descriptor is not None:
            self._look()
        self.check()

    def release(self) -> None:
        """Remove the file, if this run is still the owner."""
        if self._descriptor is None:
            return
        self._done.set()
        if self._beating is not None:
            self._beating.join(_BEAT_SECONDS)
        self._look()
        if self._error is None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        if self._beating is None or not self._beating.is_alive():  # else it still uses the file
            os.close(self._descriptor)
        self._descriptor, self._error = None, None
        _tokens.discard(self._owner["token"])

    def _try(self, take_over: bool) -> bool:
        """Whether this run is the owner now; False: what was seen has changed, look again."""
        descriptor, is_new = self._open()
        is_kept = False
        try:
            flock = _try_flock(descriptor)
            if not _is_at(descriptor, self.path):
                return False
            owner = {} if is_new else _read_owner(descriptor)
            if flock == "held":
                if not take_over or _is_this_machine(owner):
                    raise OutputError(self._in_use(owner, take_over))
                os.unlink(self.path)  # its owner will not find its token again
                return False
            if not is_new and not take_over:
                self._check_stale(owner, flock, descriptor)
            try:
                self._sign(descriptor)
            except OutputError:
                if is_new:
                    os.unlink(self.path)
                raise
            if flock == "none":
                time.sleep(_SETTLE_SECONDS)
                if _read_owner(descriptor).get("token") != self._owner["token"]:
                    return False
            is_kept = True
        finally:
            if not is_kept:
                os.close(descriptor)
        self._descriptor = descriptor
        _tokens.add(self._owner["token"])
        return True

    def _open(self) -> tuple[int, bool]:
        """The file, and whether it was made just now."""
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

    def _check_stale(self, owner: dict[str, Any], flock: str, descriptor: int) -> None:
        """Raise OutputError if the owner may be at work."""
        if flock == "ours" and (not owner or _is_this_machine(owner)):
            return
        if _is_this_machine(owner) and _is_same_namespace(owner) and _is_gone(owner):
            return
        seconds = self._age(descriptor)
        if seconds < _STALE_SECONDS:
            left = round(min(max(_STALE_SECONDS - seconds, 1), _STALE_SECONDS))
            raise OutputError(
                f"{_name(owner)} was at work on this destination {max(0, round(seconds))} seconds "
                f"ago ({self.path}). If it is gone, run the same command again in {left} seconds, "
                "or at once with --take-over."
            )

    def _in_use(self, owner: dict[str, Any], take_over: bool) -> str:
        text = f"{_name(owner)} is at work on this destination ({self.path}). Wait for it"
        if not _is_this_machine(owner):
            return f"{text}; if it is gone, add --take-over."
        more = " A running process is not taken over." if take_over else ""
        return f"{text}, or end it.{more}"

    def _age(self, descriptor: int) -> float:
        """Seconds since the last heartbeat, by the clock of the file system."""
        probe = f"{self.path}.{secrets.token_hex(4)}"
        with writing(probe):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            other = os.open(probe, flags, 0o600)
            try:
                os.write(other, b"?")
                now = os.fstat(other).st_mtime
            finally:
                os.close(other)
                os.unlink(probe)
        return now - os.fstat(descriptor).st_mtime

    def _sign(self, descriptor: int) -> None:
        self._owner = {
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "processes": _process_namespace(),
            "pid": os.getpid(),
            "token": secrets.token_hex(8),
        }
        self._write(descriptor)

    def _write(self, descriptor: int) -> None:
        text = json.dumps(self._owner).encode()[: _LOCK_BYTES - 1]
        with writing(self.path):
            os.pwrite(descriptor, text.ljust(_LOCK_BYTES - 1) + b"\n", 0)
            os.ftruncate(descriptor, _LOCK_BYTES)
            os.fsync(descriptor)

    def _beat(self) -> None:
        while not self._done.wait(_BEAT_SECONDS):
            self._look()
            if self._error is not None:
                return
            # A file system that is full or away for a while: the next one may do.
            with contextlib.suppress(OutputError):
                self._write(self._descriptor)  # type: ignore[arg-type]

    def _look(self) -> None:
        """Note an error if the file names another owner."""
        found: dict[str, Any] = {}
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        except OSError:
            return  # it cannot be told now
        else:
            try:
                found = _parse_owner(os.pread(descriptor, _LOCK_BYTES, 0))
            except OSError:
                return
            finally:
                os.close(descriptor)
        if found.get("token") != self._owner["token"]:
            self._error = OutputError(
                f"{_name(found)} has taken over or removed {self.path} while this run was at work; "
                "this run stops, and nothing is lost. Let one run at a time work on a destination."
            )


def _try_flock(descriptor: int) -> str:
    """ "ours"; "held" by another process; or "none": the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "held" if error.errno in _HELD else "none"
    return "ours"


def _read_owner(descriptor: int) -> dict[str, Any]:
    try:
        return _parse_owner(os.pread(descriptor, _LOCK_BYTES, 0))
    except OSError:
        return {}


def _parse_owner(raw: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(raw.strip(b"\0 \n") or b"{}")
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _is_this_machine(owner: dict[str, Any]) -> bool:
    """Whether this machine has been running since the owner signed."""
    boot, other = _boot_id(), owner.get("boot")
    return boot == other if boot and other else owner.get("host") == socket.gethostname()


def _is_same_namespace(owner: dict[str, Any]) -> bool:
    """Whether the owner's process number means the same here: containers have their own."""
    return owner.get("processes") == _process_namespace()


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether no process has the number of the owner any more."""
    pid = owner.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    if pid == os.getpid():  # or it is this process: of a container that was started again
        return owner.get("token") not in _tokens
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _name(owner: dict[str, Any]) -> str:
    if "pid" not in owner:
        return "another process"
    # Whoever wrote the file may have put control characters into it.
    pid, host = (ascii(str(owner.get(what)))[1:-1][:64] for what in ("pid", "host"))
    return f"process {pid} on {host}"


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _process_namespace() -> int | None:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
