"""How a command ends: exit codes and messages; and what it writes to stdout.

torchrun ends with 1 whatever its workers end with; the code is in the JSON document as well.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import NoReturn, TypeVar

from distprune.files.errors import FilesError, RanksError, explained
from distprune.files.text import printable

T = TypeVar("T")

OK, FAILURE, USAGE, DIFFERENT = range(4)
_SIGNALS = {signal.SIGINT: "interrupted.", signal.SIGTERM: "terminated."}

_DEFECT = (
    "this is a defect of distprune. Please report it, with the lines above and the output of "
    "`distprune env`."
)


class _State:
    as_json = False  # whether the command writes JSON
    has_document = False  # whether it was written


def end_on_signals() -> None:
    """Let the first SIGINT or SIGTERM raise SystemExit, so that what is open is closed."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for each in _SIGNALS:  # torchrun sends another one
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


def run(arguments: Sequence[str], command: Callable[[Sequence[str]], int | None]) -> int:
    """Run a command line; an error becomes a message, and a JSON document if it asks for one.

    Returns:
        The exit code.
    """
    _State.as_json, _State.has_document = "--json" in arguments, False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for encodings that lack characters
    try:
        try:
            code = command(arguments) or OK
        except SystemExit as end:  # of the parser, which has said why, or of a signal
            code = int(end.code or OK)
        print(end="", flush=True)
    except BrokenPipeError:  # nobody reads stdout any more, as after `| head`
        return FAILURE
    except Exception as error:
        return _report(error)
    text = {128 + number: text for number, text in _SIGNALS.items()}.get(code)
    if text is not None and is_leader():
        write_error(f"distprune: {text}")
    if code != OK:
        _write_failure(code, text or "stderr says what is wrong.")
    return code


def leave(code: int) -> None:
    """End this process without Python's own shutdown.

    In it, gloo's threads may abort the process after an error, and a closed stdout fails again.
    """
    if code in (FAILURE, USAGE) and not is_leader():
        time.sleep(1)  # torchrun ends all ranks once one has failed; rank 0 says what is wrong
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or none
            stream.flush()
    os._exit(code)


def _report(error: Exception) -> int:
    """Write what went wrong, once if all ranks have the error; return the exit code."""
    explanation = explained(error)
    is_defect = explanation is None or type(explanation) is FilesError  # the latter of another rank
    if is_defect:
        write_error("".join(map(_printable_lines, traceback.format_exception(error))))
    text = _DEFECT if is_defect else _printable_lines(str(explanation), indent="  ")
    code = FAILURE if explanation is None else explanation.exit_code
    _write_failure(code, text)
    if is_defect or isinstance(explanation, RanksError) or is_leader():
        write_error(f"distprune: {text}")
    return code


def _printable_lines(text: str, indent: str = "") -> str:
    """The lines of a message; an indent shows which lines continue it."""
    first, *rest = map(printable, text.split("\n"))
    return "\n".join([first, *(line if line[:1] == " " else indent + line for line in rest)])


def _write_failure(code: int, text: str) -> None:
    if _State.as_json and is_leader():
        with contextlib.suppress(OSError):  # which may be what is wrong
            write_document(json.dumps({"exit_code": code, "error": text}))


def write_document(text: str) -> None:
    """Write the JSON document of a command, unless one has been written."""
    if not _State.has_document:
        _State.has_document = True
        print(text, flush=True)


def write_error(text: str) -> None:
    """Write a line to stderr, if it can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def is_leader() -> bool:
    """Whether this process is rank 0 or the only one; it alone writes what concerns all ranks."""
    return os.environ.get("RANK", "0") == "0"


def is_rank() -> bool:
    """Whether torchrun started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Say, if a signal ends the work inside, that the same command resumes it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if is_leader():
            write_error("distprune: run the same command again to resume.")
        raise


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[None]:
    """Join the other ranks, if there are any, in a process group."""
    if not is_rank():
        yield
        return
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (ValueError, RuntimeError) as error:
        raise RanksError(f"could not initialise the process group: {error}") from error
    yield
    dist.destroy_process_group()  # after an error the process ends


@contextlib.contextmanager
def on_ranks(timeout: float, find: Callable[[], T]) -> Iterator[T]:
    """Join the other ranks for work that can be resumed; yields what all of them find."""
    with resumable(), process_group(timeout):
        from distprune.files.team import Team
        from distprune.ranks.process_groups import world

        yield Team(world()).attempt(find)
