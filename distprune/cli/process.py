"""How a command ends, and its standard streams: exit codes, messages, and what signals do.

An error becomes one message, one exit code and one JSON document. torchrun ends with 1 whatever its
workers end with; the code is in the report as well. Text of unknown origin, such as names in files,
may hold escape sequences of terminals.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TextIO, TypeVar

from distprune.files.errors import (
    FilesError,
    Interrupted,
    MachineError,
    OutputError,
    RanksError,
    explained,
)

T = TypeVar("T")
_HARMLESS = "\t"


def printable(text: str) -> str:
    """Write every character that is not visible as an escape sequence.

    These are control characters ("\\x1b", a line break), marks that change the direction of text,
    other spaces, and bytes of file names that are not UTF-8. A tab stays.
    """
    if text.isprintable():
        return text
    return _NOT_ASCII_PRINTABLE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match.group()
    if character.isprintable() or character in _HARMLESS:
        return character
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file name
        number -= 0xDC00
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


_NOT_ASCII_PRINTABLE = re.compile(r"[^ -~]")


class ReaderGone(Exception):
    """The reader of stdout is gone, as after ``| head``. Not an OSError: typer exits on EPIPE."""


class _State:
    as_json = False  # whether the command writes JSON
    has_document = False  # whether a JSON document was started on stdout


def prepare() -> None:
    """Make the standard streams usable in any state; call it once, before anything is written.

    A closed stream becomes /dev/null: otherwise the next file that is opened would get its number.
    Characters that an encoding lacks are written as escape sequences.
    """
    _State.has_document = False
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors="backslashreplace")


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def write(text: str) -> None:
    """Write to stdout."""
    with writing():
        sys.stdout.write(text)


def write_document(text: str) -> None:
    """Write the JSON document of a command, unless one has been written."""
    if _State.has_document:
        return
    _State.has_document = True
    with writing():
        sys.stdout.write(text)
        sys.stdout.flush()


def flush_errors() -> None:
    """Flush stderr, if it can be written."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        give_up(sys.stderr, sys.__stderr__)


def give_up(stream: TextIO | None, original: TextIO | None) -> None:
    """Discard what is left in a buffer, which Python would try to write again when it ends."""
    if stream is not None and stream is original:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Say of errors inside that stdout cannot be written, or that its reader is gone."""
    try:
        yield
    except BrokenPipeError as error:
        give_up(sys.stdout, sys.__stdout__)
        raise ReaderGone from error
    except OSError as error:
        give_up(sys.stdout, sys.__stdout__)
        raise OutputError(f"stdout cannot be written: {error.strerror}.") from error


OK = 0
INTERNAL = 1  # a defect of distprune
USAGE = 2  # the command, or the recipe
INPUT = 3  # the checkpoint, or a text
OUTPUT = 4  # the disk, or what is on it already
DISTRIBUTED = 5  # ranks that differ, or are lost
DIFFERENT = 6  # `diff --exit-code`: not the 1 of git, which would look like a defect
MACHINE = 7  # memory, open files, processes
INTERRUPTED = 130  # SIGINT
TERMINATED = 143  # SIGTERM
READER_GONE = 141  # nobody reads stdout any more, as after `| head`; SIGPIPE

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # that end a command


_DEFECT = (
    "this is a defect of distprune. Please report it, with the lines above and the output of "
    "`distprune env`."
)
_TORCH_BYTES = 750_000_000  # of address space, to import torch and start
_SECONDS_TO_SAY_WHY = 1.0  # so that rank 0 says what is wrong
_SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"  # also clears the line of a progress bar


def is_leader() -> bool:
    """Whether this process is rank 0 or the only one; it alone writes what concerns all ranks."""
    return os.environ.get("RANK", "0") == "0"


def is_rank() -> bool:
    """Whether torchrun started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


class Ending:
    """A context in which a command runs; no error leaves it, and all output is written then.

    Attributes:
        code: the exit code. Set it to what the command returns.
    """

    def __init__(self, arguments: Sequence[str], *, is_process: bool) -> None:
        self.code = OK
        _State.as_json = wants_json(arguments)
        self._is_process = is_process
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        with contextlib.suppress(ValueError):  # only the main thread can set handlers
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, _end_at_once)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if error is not None and not isinstance(error, Exception | SystemExit):
            return False
        try:
            self.code = self._code_of(error)
            with writing():
                sys.stdout.flush()
        except OutputError as full:
            self.code = _report(full)
        except (ReaderGone, BrokenPipeError):
            give_up(sys.stdout, sys.__stdout__)
            self.code = READER_GONE
        finally:
            flush_errors()
            # A signal while Python shuts down then ends the process without a traceback.
            for number, handler in self._previous.items():
                signal.signal(number, signal.SIG_DFL if self._is_process else handler)
        if self._is_process and is_rank():
            self._leave()
        return True

    def _code_of(self, error: BaseException | None) -> int:
        if isinstance(error, ReaderGone):
            raise error
        if isinstance(error, Exception):
            return _report(error)
        code = self.code
        if isinstance(error, SystemExit):
            # The parsers exit with 2; only rich and typer with 1, if the reader of stdout is gone.
            code = error.code if isinstance(error.code, int) else OK
            if code == INTERNAL:
                raise ReaderGone from error
        if code != OK and _State.as_json and is_leader():
            _write_json(code, "stderr says what is wrong.")  # dropped if there is a document
        return code

    def _leave(self) -> NoReturn:
        """End this rank without Python's own shutdown, in which gloo may abort the process.

        A sharded model, or an error, keeps gloo's groups and their threads until then. A thread
        that frees the tensors of a collective aborts with "terminate called without an active
        exception".
        """
        if self.code not in (OK, INTERRUPTED, TERMINATED) and not is_leader():
            time.sleep(_SECONDS_TO_SAY_WHY)  # torchrun ends all ranks once one has failed
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, full, or none
                stream.flush()
        os._exit(self.code)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process with one line, even while modules are imported.

    Nothing is raised: an exception in the middle of an import causes other errors, or is lost.
    Work that writes files handles signals itself; see :class:`Stop`.
    """
    is_interrupt = number == signal.SIGINT
    code = INTERRUPTED if is_interrupt else TERMINATED
    text = "interrupted." if is_interrupt else "terminated."
    if is_leader():
        if _State.as_json and not _State.has_document:
            _write_at_once(1, json.dumps({"exit_code": code, "error": text}) + "\n")
        with contextlib.suppress(OSError):
            line = f"distprune: {text}\n"
            _write_at_once(2, _SHOW_CURSOR + line if os.isatty(2) else line)
    os._exit(code)


def check_memory_limit() -> None:
    """Raise MachineError where the libraries of torch would abort: that cannot be caught."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _TORCH_BYTES:
        raise MachineError(
            f"the memory of a process is limited to {limit / 1e6:.0f} MB; expected at least "
            f"{_TORCH_BYTES / 1e6:.0f} MB, which torch needs. Raise the limit (`ulimit -v`)."
        )


def _report(error: Exception) -> int:
    """Write what went wrong, once if all ranks have the error; return the exit code."""
    explanation = explained(error)
    code = INTERNAL if explanation is None else explanation.exit_code
    if explanation is None or code == INTERNAL:
        write_error(_printable_lines("".join(traceback.format_exception(error)).rstrip()))
        text = _DEFECT
    else:
        text = _printable_lines(str(explanation), indent="  ")
    if _State.as_json and is_leader():
        _write_json(code, text)
    if code in (INTERNAL, DISTRIBUTED) or is_leader():
        write_error(f"distprune: {text}")
    return code


def _printable_lines(text: str, indent: str = "") -> str:
    """The lines of a message; an indent shows which lines continue it."""
    first, *rest = [printable(line) for line in text.split("\n")]
    return "\n".join([first, *(line if line[:1] == " " else indent + line for line in rest)])


def _write_json(code: int, text: str) -> None:
    # The error may be that stdout cannot be written.
    with contextlib.suppress(FilesError):
        write_document(json.dumps({"exit_code": code, "error": text}) + "\n")


def write_error(text: str) -> None:
    """Write a line to stderr, if it can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _write_at_once(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode("ascii", "backslashreplace"))


class Stop:
    """Whether long work should stop; pass it as ``stop`` to the functions of ``distprune.files``.

    It is true after SIGINT or SIGTERM. A second signal ends the process at once.

    Attributes:
        code: exit code of the signal that was received; None before one is.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.code is not None

    def __enter__(self) -> Stop:
        for number in SIGNALS:
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if isinstance(error, Interrupted):
            error.exit_code = self.code or TERMINATED

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.code is not None:
            _end_at_once(number, frame)
        self.code = INTERRUPTED if number == signal.SIGINT else TERMINATED


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
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def on_ranks(timeout: float, find: Callable[[], T]) -> Iterator[tuple[T, Stop]]:
    """Join the other ranks; yields what all of them find, and whether to stop."""
    # Listen before the ranks meet: a signal to all of them must not end some of them at once.
    with Stop() as stop, process_group(timeout):
        from distprune._common.process_groups import world
        from distprune.files.team import Team

        yield Team(world()).attempt(find), stop
