"""Runs all checks in sequence, each with a deadline, and collects the findings of all ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import platform
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import distprune
from distprune.selftest.checks import CHECKS, WRAPPINGS, Case, Findings, NotTried
from distprune.torch_private.private_fields import TESTED

_MAX_SHOWN = 8  # problems of one check


def run(
    ranks: Ranks,
    *,
    started: Callable[[dict[str, Any]], None] = lambda facts: None,
    finished: Callable[[list[Result]], None] = lambda results: None,
    stuck: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run every check on every wrapping that these ranks allow. Collective.

    Args:
        ranks: all ranks.
        started: called with the facts, before the first check.
        finished: called with the results of each wrapping.
        stuck: called from another thread when this process hangs; should end the process.

    Returns:
        The report, the same on every rank.
    """
    began = time.perf_counter()
    report = Report(facts(ranks))
    started(report.facts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for wrapping in WRAPPINGS:
            reason = wrapping.why_not(ranks.size)
            if reason is not None:
                results = [Result(wrapping.name, None, NOT_TRIED, reason)]
                report.results += results
            else:
                results = _run_checks(ranks, Case(wrapping, ranks.device), report, stuck)
            finished(results)
            if report.ended is not None:
                break
    report.seconds = round(time.perf_counter() - began, 3)
    return report


def facts(ranks: Ranks) -> dict[str, Any]:
    """Versions, device, backend and ranks, for a bug report."""
    device = ranks.device.type
    if device != "cpu" and hasattr(torch.get_device_module(device), "get_device_name"):
        device += f" ({torch.get_device_module(device).get_device_name()})"
    versions = {
        "distprune": distprune.__version__,
        "torch": f"{torch.__version__} (tested: {TESTED[0]} to {TESTED[1]})",
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "backend": ranks.backend,
        "ranks": ranks.size,
    }
    if ranks.notes:
        versions["note"] = "; ".join(ranks.notes)
    return versions


def _run_checks(
    ranks: Ranks, case: Case, report: Report, stuck: Callable[[Report], None]
) -> list[Result]:
    results = []
    for name, check in CHECKS.items():
        began = time.perf_counter()
        result = Result(case.wrapping.name, name, FAILED)
        # This text is reported if the process hangs.
        result.wrong = [f"did not end within {ranks.timeout:.0f} s"]
        partial_report = Report(report.facts, [*report.results, result], "this process hangs")
        alarm = threading.Timer(ranks.timeout + 2 * _MARGIN, stuck, [partial_report])
        alarm.daemon = True
        alarm.start()
        try:
            _judge(result, ranks, _attempt(check, case), report)
        except LostError as error:
            result.wrong = [str(error)]
            report.ended = "a rank is lost"
        finally:
            alarm.cancel()
        result.seconds = round(time.perf_counter() - began, 3)
        report.results.append(result)
        results.append(result)
        if report.ended is not None:
            break
    return results


def _attempt(check: Callable[[Case], Findings], case: Case) -> dict[str, Any]:
    """The findings of a check on this rank, as plain values for the other ranks."""
    outcome = {"tried": True, "raised": False}
    try:
        return {**outcome, **asdict(check(case))}
    except NotTried as reason:
        return {**outcome, "tried": False, "wrong": [], "detail": str(reason)}
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        return {**outcome, "raised": True, "wrong": [trace], "detail": ""}


def _judge(result: Result, ranks: Ranks, mine: dict[str, Any], report: Report) -> None:
    """Complete a result with the outcomes of all ranks."""
    outcomes = ranks.share(mine)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        for text in outcome["wrong"]:
            ranks_by_text.setdefault(text, []).append(rank)
    result.wrong = [
        f"rank {', '.join(map(str, with_text))}: {text}" if ranks.size > 1 else text
        for text, with_text in list(ranks_by_text.items())[:_MAX_SHOWN]
    ]
    if len(ranks_by_text) > _MAX_SHOWN:
        result.wrong.append(f"and {len(ranks_by_text) - _MAX_SHOWN} more")
    tried = all(outcome["tried"] for outcome in outcomes)
    result.status = FAILED if ranks_by_text else OK if tried else NOT_TRIED
    result.detail = outcomes[0]["detail"]
    if len({outcome["raised"] for outcome in outcomes}) > 1:
        # The other ranks may be inside a collective that this rank has left.
        report.ended = "a check raised on some ranks only, which are out of step since then"


def end_process(code: int) -> None:
    """End a process that hangs, with the stacks of its threads on stderr."""
    faulthandler.dump_traceback(file=sys.stderr)
    sys.stdout.flush()
    os._exit(code)


# Seconds that a rank gets to report an error of the backend; after twice as many it hangs.
_MARGIN = 10.0


class LostError(RuntimeError):
    """Ranks did not meet, or did not answer in time."""


class Ranks:
    """The ranks that torchrun started, or this process alone.

    Args:
        timeout: seconds in which each step has to end.
        cpu: use the CPU even if there are accelerators.
        share: use gloo, on accelerators too, so that several ranks may have one of them.
        meeting: (store, rank, number of ranks), if the caller has arranged it.

    Raises:
        LostError: the ranks do not find each other, or would use different devices.

    Attributes:
        rank, size: this rank, and the number of ranks.
        device: the device of this rank.
        backend: of torch.distributed.
        notes: why an accelerator of this machine is not used.
    """

    def __init__(
        self,
        timeout: float,
        *,
        cpu: bool = False,
        share: bool = False,
        meeting: tuple[Store, int, int] | None = None,
    ) -> None:
        self.timeout = timeout
        self.notes: list[str] = []
        self._num_shared = 0
        patience = timedelta(seconds=timeout + _MARGIN)
        try:
            self._store, self.rank, self.size = meeting or _meet(patience)
            self._store.set_timeout(patience)
            self.device, self.backend = self._choose_device(cpu, share)
            devices = self.share(self.device.type)
            if len(set(devices)) > 1:
                raise LostError(
                    f"the ranks would use different devices ({', '.join(sorted(set(devices)))}); "
                    "expected one kind of device on every machine. Pass --cpu to use none."
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
            if isinstance(error, LostError):
                raise
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
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{key}/{self.rank}", json.dumps(value))
            try:
                answers = json.loads(self._store.get(key))
            except RuntimeError as error:
                raise LostError(f"rank 0 did not answer within {self.timeout:.0f} s") from error
        else:
            answers = [value, *(self._answer(f"{key}/{r}") for r in range(1, self.size))]
            self._store.set(key, json.dumps(answers))
        lost = [rank for rank, answer in enumerate(answers) if answer == _NO_ANSWER]
        if lost:
            ranks = "ranks " + ", ".join(map(str, lost)) if len(lost) > 1 else f"rank {lost[0]}"
            raise LostError(f"{ranks} did not answer within {self.timeout:.0f} s")
        return answers

    def leave(self) -> None:
        """Destroy the process group; rank 0, which may serve the store, goes last."""
        with contextlib.suppress(LostError):
            self.share(None)
        if not self.rank:
            for rank in range(1, self.size):
                with contextlib.suppress(RuntimeError):
                    self._store.get(f"left/{rank}")
        dist.destroy_process_group()
        if self.rank:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"left/{self.rank}", "")

    def _answer(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key))
        except RuntimeError:
            self._store.set_timeout(timedelta(seconds=1))  # the other ranks had the same time
            return _NO_ANSWER

    def _choose_device(self, cpu: bool, share: bool) -> tuple[torch.device, str]:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or cpu:
            return torch.device("cpu"), "gloo"
        backend = dist.get_default_backend_for_device(accelerator.type)
        number = torch.accelerator.device_count()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        if share:
            index = int(os.environ.get("LOCAL_RANK", self.rank)) % number
            torch.accelerator.set_device_index(index)
            return torch.device(accelerator.type, index), "gloo"
        if backend == "gloo" or not dist.is_backend_available(backend):
            self.notes.append(f"no backend for {accelerator.type}: the CPU is tested")
        elif local_size > number:
            self.notes.append(
                f"{local_size} ranks would share {number} {accelerator.type} devices: the CPU is "
                "tested. With --share they have them in common, over gloo"
            )
        else:
            index = int(os.environ.get("LOCAL_RANK", 0))
            torch.accelerator.set_device_index(index)
            return torch.device(accelerator.type, index), backend
        return torch.device("cpu"), "gloo"


def _meet(patience: timedelta) -> tuple[Store, int, int]:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = next(rendezvous("env://", timeout=patience))
        return store, rank, size
    return HashStore(), 0, 1


_NO_ANSWER = "no answer"


OK, FAILED, NOT_TRIED = "ok", "FAILED", "not tried"


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


class Lines:
    """The text of a report, line by line, as results arrive.

    Args:
        wrappings: names of the rows.
        checks: names of the columns.
    """

    def __init__(self, wrappings: Iterable[str], checks: Sequence[str]) -> None:
        self._width = max(map(len, wrappings)) + 2
        self._checks = list(checks)

    def head(self, facts: dict[str, Any]) -> str:
        """Versions, and the names of the columns."""
        width = max(map(len, facts)) + 2
        lines = [f"{key:<{width}}{value}" for key, value in facts.items()]
        return "\n".join([*lines, "", self._row("", self._checks)])

    def row(self, wrapping: str, results: Sequence[Result]) -> str:
        """The line of one wrapping."""
        if results[0].check is None:
            return self._row(wrapping, [f"not tried: {results[0].detail}"])
        cells = {
            result.check: (result.detail or OK) if result.status == OK else result.status
            for result in results
            if result.status != NOT_TRIED
        }
        return self._row(wrapping, [cells.get(check, "-") for check in self._checks])

    def end(self, report: Report) -> str:
        """The checks that were not tried, those that failed, and the conclusion."""
        lines = [""]
        reasons: dict[tuple[str, str], list[str]] = {}
        for result in report.of_status(NOT_TRIED):
            if result.check is not None:
                reasons.setdefault((result.check, result.detail), []).append(result.wrapping)
        for (check, reason), wrappings in reasons.items():
            lines.append(f'not tried: "{check}" on {", ".join(wrappings)}: {reason}')
        failed = report.of_status(FAILED)
        for result in failed:
            lines += [f'FAILED: "{result.check}" on {result.wrapping}', *_indented(result.wrong)]
        if report.ended is not None:
            lines.append(f"ended early: {report.ended}")
        num_tried, took = len(failed) + len(report.of_status(OK)), f"{report.seconds:.1f} s"
        holds = f"Everything that was tried holds: {num_tried} checks"
        fails = f"{len(failed)} of {num_tried} checks FAILED"
        lines.append(f"{holds if report.holds else fails}, {took}.")
        return "\n".join(lines).removeprefix("\n" if len(lines) == 1 else "")

    def _row(self, name: str, cells: Sequence[str]) -> str:
        widths = [max(len(check), 8) + 2 for check in self._checks]
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)]
        return (f"{name:<{self._width}}" + "".join(padded)).rstrip()


def _indented(texts: Sequence[str]) -> list[str]:
    return ["    " + line for text in texts for line in text.splitlines()]
