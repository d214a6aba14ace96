"""The process that a lock file names, and whether that process may still be running."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

NUM_BYTES = 1024  # of every lock file, so that one write replaces all of it


@dataclass(frozen=True)
class Owner:
    """What a lock file says about its owner.

    Attributes:
        facts: host, boot id, process namespace, pid and a token that is drawn for each run. Anybody
            may have written the file, so each of them may be missing or of any type.
    """

    facts: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def this_process(cls) -> Owner:
        """This process, with a new token."""
        return cls(
            {
                "host": socket.gethostname(),
                "boot": boot_id(),
                "processes": process_namespace(),
                "pid": os.getpid(),
                "token": secrets.token_hex(8),
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Owner:
        """The owner that a file names; without facts if the file is empty or damaged."""
        try:
            facts = json.loads(raw.strip(b"\0 \n") or b"{}")
        except (ValueError, RecursionError):
            return cls()
        return cls(facts) if isinstance(facts, dict) else cls()

    @classmethod
    def read(cls, descriptor: int) -> Owner:
        """The owner that an open file names.

        Raises:
            OSError: the file cannot be read.
        """
        return cls.from_bytes(os.pread(descriptor, NUM_BYTES, 0))

    def to_bytes(self) -> bytes:
        """The content of a lock file."""
        text = json.dumps(dict(self.facts)).encode()[: NUM_BYTES - 1]
        return text.ljust(NUM_BYTES - 1) + b"\n"

    @property
    def token(self) -> object:
        """The token of the owner's run; None if the file has none."""
        return self.facts.get("token")

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the owner ran on this machine since the machine was last started."""
        boot, other = boot_id(), self.facts.get("boot")
        return boot == other if boot and other else self.facts.get("host") == socket.gethostname()

    def has_ended(self, own_tokens: Collection[object]) -> bool:
        """Whether the owner's process is known to have ended.

        Args:
            own_tokens: of the locks that this process owns. An owner with the pid of this process
                and another token ran before this container was restarted.
        """
        pid = self.facts.get("pid")
        if not self.is_on_this_machine or self.facts.get("processes") != process_namespace():
            return False  # its pid means nothing here
        if not isinstance(pid, int) or pid <= 0:
            return False
        if pid == os.getpid():
            return self.token not in own_tokens
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def __str__(self) -> str:
        if "pid" not in self.facts:
            return "another process"
        # The file may hold control characters.
        pid, host = (ascii(str(self.facts.get(key)))[1:-1][:64] for key in ("pid", "host"))
        return f"process {pid} on {host}"


def boot_id() -> str | None:
    """A number that the machine draws when it starts; None where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def process_namespace() -> int | None:
    """Identifies the set of processes in which a pid is valid: each container has its own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
