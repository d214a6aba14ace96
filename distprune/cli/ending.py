"""How a command ends: what went wrong becomes one message, one exit code, one JSON document."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

from distprune.cli import exits, limits, ranks, streams
from distprune.cli.escaping import printable
from distprune.files.errors import FilesError, explained

_DEFECT = (
    "this is a defect of distprune. Please report it, with the lines above and the output of "
    "`distprune env`."
)
_SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # over what a progress bar left on a terminal


def finish(
    run: Callable[[Sequence[str]], int], given: Sequence[str], *, is_process: bool = False
) -> int:
    """Run a command; its exit code, whatever happens. All is written when this returns.

    Args:
        run: the command.
        given: its arguments.
        is_process: the process ends with the command. A rank that fails then ends here.
    """
    as_json = streams.wants_json(given)
    try:
        try:
            with limits.checked_before_torch():
                code = run(given)
            streams.flush()
            if code != exits.OK and as_json and ranks.is_leader():
                _write_json(code, "stderr says what is wrong.")  # unless there is a document
            return code
        except SystemExit as exit_:
            # The parsers use 2. Only rich and typer end with 1: when nobody reads stdout.
            code = exit_.code if isinstance(exit_.code, int) else exits.OK
            if code == exits.INTERNAL:
                raise streams.ReaderGone from exit_
            if code != exits.OK and as_json and ranks.is_leader():
                _write_json(code, "wrong usage; stderr says what is wrong.")
            streams.flush()
            return code
        except Exception as error:
            if isinstance(error, streams.ReaderGone):
                raise
            code = _report(error, as_json)
            if is_process and ranks.is_rank():
                _leave_at_once(code)
            return code
    except (streams.ReaderGone, BrokenPipeError):
        streams.give_up(sys.stdout, sys.__stdout__)
        return exits.READER_GONE
    finally:
        streams.flush_errors()


def _leave_at_once(code: int) -> NoReturn:
    """End this rank while its error still holds the process group.

    Other ranks may be connected to it, and gloo aborts the process ("terminate called without an
    active exception") when the group is destroyed then, which would hide the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or none
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def signals_end_the_process(as_json: bool, is_process: bool) -> Iterator[None]:
    """SIGINT and SIGTERM end the process with one line, also while modules are imported.

    Nothing is raised: an exception in the middle of an import ends in other errors, or is lost.
    Work that leaves files behind listens by itself; see :class:`distprune.cli.stopping.Stop`.

    Args:
        as_json: a JSON document is written, unless one was begun.
        is_process: the process ends with the command.
    """

    def end(number: int, frame: FrameType | None) -> None:
        is_interrupt = number == signal.SIGINT
        code = exits.INTERRUPTED if is_interrupt else exits.TERMINATED
        text = "interrupted." if is_interrupt else "terminated."
        if as_json and ranks.is_leader() and not streams.has_document():
            _write_at_once(1, json.dumps({"exit_code": code, "error": text}) + "\n")
        if ranks.is_leader():
            with contextlib.suppress(OSError):
                text = f"distprune: {text}\n"
                _write_at_once(2, _SHOW_CURSOR + text if os.isatty(2) else text)
        os._exit(code)

    end.ends_the_process = True  # type: ignore[attr-defined]
    before = {}
    with contextlib.suppress(ValueError):  # signals are the main thread's
        for number in (signal.SIGINT, signal.SIGTERM):
            if ranks.is_child() or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, end)
        if ranks.is_child():  # it was started with both blocked
            signal.pthread_sigmask(signal.SIG_UNBLOCK, list(before))
    try:
        yield
    finally:
        # While Python shuts down, a signal ends the process without a traceback.
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if is_process else handler)


def _report(error: Exception, as_json: bool) -> int:
    """Say what went wrong, once for all ranks if they all know it; the exit code."""
    known = explained(error)
    code = exits.INTERNAL if known is None else known.exit_code
    if known is None or code == exits.INTERNAL:
        _write_error(_printable_lines("".join(traceback.format_exception(error)).rstrip()))
        text = _DEFECT
    else:
        text = _printable_lines(str(known), indent="  ")
    if as_json and ranks.is_leader():
        _write_json(code, text)
    if code == exits.INTERNAL or code == exits.DISTRIBUTED or ranks.is_leader():
        _write_error(f"distprune: {text}")
    return code


def _printable_lines(text: str, indent: str = "") -> str:
    """Lines of a message; with an indent, none of them looks like the beginning of another one."""
    first, *rest = [printable(line) for line in text.split("\n")]
    return "\n".join([first, *(line if line[:1] == " " else indent + line for line in rest)])


def _write_json(code: int, text: str) -> None:
    # What was wrong may be stdout itself.
    with contextlib.suppress(FilesError):
        streams.write_document(json.dumps({"exit_code": code, "error": text}) + "\n")


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _write_at_once(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode("ascii", "backslashreplace"))
