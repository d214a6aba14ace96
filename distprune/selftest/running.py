"""Runs the checks on all ranks, each with a deadline, and says what holds.

Results travel through the store at which the ranks met, and not through the backend under
test: a rank that failed in the middle of a collective can still report it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import distprune
from distprune.selftest.checks import CHECKS, NEEDS_TWO_RANKS, WRAPPINGS, Case, why_not
from distprune.torch_private.private_fields import TESTED

OK, FAILED, NOT_TRIED = "ok", "FAILED", "not tried"
_MARGIN = 10.0  # seconds that a rank gets to report an error of the backend
_NO_ANSWER = "no answer"


class LostError(Exception):
    """Ranks did not meet, or did not answer in time."""


class Ranks:
    """The ranks that torchrun started, or this process alone.

    Args:
        timeout: seconds in which each step has to end.
        cpu: use the CPU even if there are accelerators.
        share: use gloo, on accelerators too, so that several ranks may have one of them.

    Raises:
        LostError: the ranks do not find each other, or would use different devices.

    Attributes:
        rank, size: this rank, and the number of ranks.
        device: the device of this rank.
        backend: of torch.distributed.
        note: why an accelerator of this machine is not used; "" if there is no such reason.
    """

    def __init__(self, timeout: float, *, cpu: bool = False, share: bool = False) -> None:
        self.timeout = timeout
        self._num_shared = 0
        patience = timedelta(seconds=timeout + _MARGIN)
        try:
            self._store, self.rank, self.size = meet(patience)
            self._store.set_timeout(patience)
            self.device, self.backend, self.note = choose_device(self.rank, self.size, cpu, share)
            kinds = sorted(set(self.share(self.device.type)))
            if len(kinds) > 1:
                raise LostError(
                    f"the ranks would use different devices ({', '.join(kinds)}); expected one "
                    "kind of device on every machine. Pass --cpu to use none."
                )
            dist.init_process_group(
                self.backend,
                store=PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout),
                device_id=None if self.backend == "gloo" else self.device,
            )
        except (ValueError, RuntimeError) as error:
            raise LostError(f"the ranks did not meet: {error}") from error

    def share(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of ranks; the same on every rank.

        Args:
            value: a value that JSON can represent.

        Raises:
            LostError: names the ranks that did not answer in time; on every other rank.
        """
        self._num_shared += 1
        answers: list[Any]
        key = f"shared{self._num_shared}"
        if self.rank:
            try:
                self._store.set(f"{key}/{self.rank}", json.dumps(value))
                answers = json.loads(self._store.get(key))
            except RuntimeError as error:
                raise LostError(f"rank 0 did not answer within {self.timeout:.0f} s") from error
        else:
            answers = [value, *(self._answer(f"{key}/{r}") for r in range(1, self.size))]
            self._store.set(key, json.dumps(answers))
        lost = [str(rank) for rank, answer in enumerate(answers) if answer == _NO_ANSWER]
        if lost:
            ranks = f"rank{'s' if len(lost) > 1 else ''} {', '.join(lost)}"
            raise LostError(f"{ranks} did not answer within {self.timeout:.0f} s")
        return answers

    def leave(self) -> None:
        """Destroy the process group; rank 0, which may serve the store, goes last."""
        with contextlib.suppress(LostError):
            self.share(None)
        dist.destroy_process_group()
        with contextlib.suppress(LostError):
            self.share(None)

    def _answer(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key))
        except RuntimeError:
            self._store.set_timeout(timedelta(seconds=1))  # the other ranks had the same time
            return _NO_ANSWER


def choose_device(rank: int, size: int, cpu: bool, share: bool) -> tuple[torch.device, str, str]:
    """The device of a rank, the backend, and why an accelerator of this machine is not used."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or cpu:
        return torch.device("cpu"), "gloo", ""
    kind, number = accelerator.type, torch.accelerator.device_count()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    backend = "gloo" if share else dist.get_default_backend_for_device(kind)
    has_backend = backend != "gloo" and dist.is_backend_available(backend)
    if not share and (not has_backend or local_size > number):
        note = (
            f"{local_size} ranks would share {number} {kind} devices, or {kind} has no backend: "
            "the CPU is tested. With --share they have the devices in common, over gloo"
        )
        return torch.device("cpu"), "gloo", note
    index = int(os.environ.get("LOCAL_RANK", rank)) % number
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index), backend, ""


def meet(patience: timedelta) -> tuple[Store, int, int]:
    """A store that all ranks reach, this rank, and the number of ranks."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=patience))
        return store, rank, size
    return HashStore(), 0, 1


@dataclass
class Result:
    """One check on one wrapping.

    Attributes:
        wrapping, check: their names; check is None if the wrapping could not be tried.
        status: ``OK``, ``FAILED`` or ``NOT_TRIED``.
        detail: a measurement, or why the check was not tried.
        wrong: the problems, with their ranks.
        seconds: on rank 0.
    """

    wrapping: str
    check: str | None
    status: str
    detail: str = ""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Report:
    """The results of a self-test.

    Attributes:
        facts: versions, device, backend and ranks, for a bug report.
        results: in the order of the checks.
        ended: why the self-test ended early; None if all checks ran.
        seconds: total time, without importing torch.
    """

    facts: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    ended: str | None = None
    seconds: float = 0.0

    def of_status(self, status: str) -> list[Result]:
        """The results with this status."""
        return [result for result in self.results if result.status == status]

    @property
    def holds(self) -> bool:
        """Whether all checks that were tried passed, and the self-test did not end early."""
        return self.ended is None and not self.of_status(FAILED)

    def as_json(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {"holds": self.holds, **asdict(self)}


def run(ranks: Ranks, report: Report) -> Iterator[list[Result]]:
    """Run every check on every wrapping that these ranks allow. Collective.

    Args:
        ranks: all ranks.
        report: a new one; it is the same on every rank at the end.

    Yields:
        The results of each wrapping.
    """
    began = time.perf_counter()
    for wrapping in WRAPPINGS:
        num_before, reason = len(report.results), ""
        if ranks.size < wrapping.min_ranks or ranks.size % wrapping.num_axes:
            is_odd = ranks.size >= wrapping.min_ranks
            reason = f"needs {'an even number of' if is_odd else wrapping.min_ranks} ranks"
        elif wrapping.library:
            found = why_not(wrapping.library, ranks.device, ranks.backend)
            reason = next(filter(None, ranks.share(found)), "")
        if reason:
            report.results.append(Result(wrapping.name, None, NOT_TRIED, reason))
        for name in () if reason else CHECKS:
            if report.ended is None and (ranks.size > 1 or name != NEEDS_TWO_RANKS):
                case = Case(wrapping, ranks.device, ranks.rank, ranks.size)
                report.results.append(_result(name, case, ranks, report))
        report.seconds = round(time.perf_counter() - began, 3)
        yield report.results[num_before:]
        if report.ended is not None:
            return


def facts(ranks: Ranks) -> dict[str, Any]:
    """Versions, device, backend and ranks, for a bug report."""
    device = ranks.device.type
    if device != "cpu" and hasattr(torch.get_device_module(device), "get_device_name"):
        device += f" ({torch.get_device_module(device).get_device_name()})"
    found = {
        "distprune": distprune.__version__,
        "torch": f"{torch.__version__} (tested: {TESTED[0]} to {TESTED[1]})",
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "backend": ranks.backend,
        "ranks": ranks.size,
    }
    return found | ({"note": ranks.note} if ranks.note else {})


def _result(name: str, case: Case, ranks: Ranks, report: Report) -> Result:
    """Run a check; the report says so if that ends the self-test."""
    began, has_raised = time.perf_counter(), False
    # A process that still hangs when the backend has timed out ends with its stacks.
    faulthandler.dump_traceback_later(ranks.timeout + 2 * _MARGIN, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = list(CHECKS[name](case))
    except Exception as error:
        wrong, has_raised = ["".join(traceback.format_exception(error)).rstrip()], True
    finally:
        faulthandler.cancel_dump_traceback_later()
    try:
        answers = ranks.share([wrong, has_raised])
        wrong = [
            f"rank {rank}: {text}" if ranks.size > 1 else text
            for rank, (texts, _) in enumerate(answers)
            for text in texts
        ]
        if len({has_raised for _, has_raised in answers}) > 1:
            # The other ranks may be inside a collective that this rank has left.
            report.ended = "a check raised on some ranks only, which are out of step since then"
    except LostError as error:
        wrong, case.detail, report.ended = [str(error)], "", "a rank is lost"
    status, seconds = FAILED if wrong else OK, round(time.perf_counter() - began, 3)
    return Result(case.wrapping.name, name, status, case.detail, wrong, seconds)


def head_text(report: Report) -> str:
    """Versions, and the names of the columns."""
    width = max(map(len, report.facts)) + 2
    lines = [f"{name:<{width}}{value}" for name, value in report.facts.items()]
    return "\n".join([*lines, "", _row("", CHECKS)])


def row_text(results: Sequence[Result]) -> str:
    """The line of one wrapping; "-" is a check that was not tried."""
    first = results[0]
    if first.check is None:
        return _row(first.wrapping, [f"{NOT_TRIED}: {first.detail}"])
    cells = {r.check: (r.detail or OK) if r.status == OK else FAILED for r in results}
    return _row(first.wrapping, [cells.get(check, "-") for check in CHECKS])


def end_text(report: Report) -> str:
    """The checks that failed, and the conclusion."""
    lines, failed = [""], report.of_status(FAILED)
    for result in failed:
        lines.append(f'FAILED: "{result.check}" on {result.wrapping}')
        lines += ["    " + line for text in result.wrong for line in text.splitlines()]
    if report.ended is not None:
        lines.append(f"ended early: {report.ended}")
    num_tried = len(failed) + len(report.of_status(OK))
    holds = f"Everything that was tried holds: {num_tried} checks"
    fails = f"{len(failed)} of {num_tried} checks FAILED"
    return "\n".join([*lines, f"{holds if report.holds else fails}, {report.seconds:.1f} s."])


def _row(name: str, cells: Iterable[str]) -> str:
    width = max(len(wrapping.name) for wrapping in WRAPPINGS) + 2
    return (f"{name:<{width}}" + "".join(f"{cell:<16}" for cell in cells)).rstrip()
