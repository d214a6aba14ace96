"""SIGINT and SIGTERM during long work, which then stops between two chunks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from distprune.cli import exits, ranks, starting
from distprune.files.errors import Interrupted


class Stop:
    """Whether long work should stop; pass it as ``stop`` to the functions of ``distprune.files``.

    It is true after SIGINT or SIGTERM. A second signal ends the process at once. In a process that
    ``--nproc`` started, it is also true once the process that started it has ended.

    Attributes:
        code: exit code of the signal that was received; None before one is.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._previous_handlers: dict[int, Any] = {}
        parent = os.environ.get(ranks.PARENT)
        self._parent = None if parent is None else int(parent)

    def __call__(self) -> bool:
        return self.code is not None or (self._parent is not None and os.getppid() != self._parent)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while in the context.

        Raises:
            Interrupted: as raised by the body, with the exit code of the signal.
        """
        self._previous_handlers = {
            number: signal.signal(number, self._on_signal) for number in starting.SIGNALS
        }
        try:
            yield
        except Interrupted as error:
            error.exit_code = self.code or exits.TERMINATED
            raise
        finally:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_second = self.code is not None
        self.code = exits.INTERRUPTED if number == signal.SIGINT else exits.TERMINATED
        if is_second:
            handler = self._previous_handlers[number]
            if getattr(handler, "ends_the_process", False):
                handler(number, frame)  # it writes a message
            os._exit(self.code)
