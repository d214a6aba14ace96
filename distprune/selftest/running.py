"""Runs all checks, one after the other, each with a deadline, and learns what every rank found."""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

import distprune
from distprune.selftest.checks import CHECKS, Found, NotTried, remove_checkpoints
from distprune.selftest.models import WRAPPINGS, Case
from distprune.selftest.ranks import LostError, Ranks
from distprune.selftest.table import FAILED, NOT_TRIED, OK, Report, Result
from distprune.torch_private.private_fields import TESTED

_MARGIN = 20.0  # seconds after a deadline, in which the backend and the store give up first
_MAX_SHOWN = 8  # sentences of one check


def run(
    ranks: Ranks,
    folder: str | None = None,
    *,
    started: Callable[[dict[str, Any]], None] = lambda facts: None,
    finished: Callable[[list[Result]], None] = lambda results: None,
    stuck: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run every check on every wrapping that these ranks allow. Collective.

    Args:
        ranks: all of them.
        folder: where checkpoints may be written; a temporary one of rank 0 by default.
        started: called with the facts, before the first check.
        finished: called with the results of each wrapping.
        stuck: called, from another thread, when this process hangs; it should end it.

    Returns:
        The report, the same on every rank.
    """
    began = time.perf_counter()
    report = Report(facts(ranks))
    started(report.facts)
    common, made = _common_folder(ranks, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for wrapping in WRAPPINGS:
                reason = wrapping.why_not(ranks.size)
                case = Case(wrapping, ranks.device, common)
                if reason is not None:
                    results = [Result(wrapping.name, None, NOT_TRIED, reason)]
                    report.results += results
                else:
                    results = _run_checks(ranks, case, report, stuck)
                finished(results)
                if report.ended is not None:
                    break
    finally:
        if made is not None:
            remove_checkpoints(made)
    report.seconds = round(time.perf_counter() - began, 3)
    return report


def facts(ranks: Ranks) -> dict[str, Any]:
    """What a bug report starts with."""
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
    if ranks.notes:
        found["note"] = "; ".join(ranks.notes)
    return found


def _run_checks(
    ranks: Ranks, case: Case, report: Report, stuck: Callable[[Report], None]
) -> list[Result]:
    results = []
    for name, check in CHECKS.items():
        began = time.perf_counter()
        result = Result(case.wrapping.name, name, FAILED)
        # Reported as it stands if this process hangs.
        result.wrong = [f"did not end within {ranks.timeout:.0f} s"]
        watched = Report(report.facts, [*report.results, result], "this process hangs")
        alarm = threading.Timer(ranks.timeout + _MARGIN, stuck, [watched])
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


def _attempt(check: Callable[[Case], Found], case: Case) -> dict[str, Any]:
    """What a check found on this rank, for the others to read."""
    found = {"tried": True, "raised": False}
    try:
        return {**found, **asdict(check(case))}
    except NotTried as reason:
        return {**found, "tried": False, "wrong": [], "detail": str(reason)}
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        return {**found, "raised": True, "wrong": [trace], "detail": ""}


def _judge(result: Result, ranks: Ranks, mine: dict[str, Any], report: Report) -> None:
    """Complete a result with what all ranks found."""
    found = ranks.share(mine)
    by_text: dict[str, list[int]] = {}
    for rank, each in enumerate(found):
        for text in each["wrong"]:
            by_text.setdefault(text, []).append(rank)
    result.wrong = [
        f"rank {', '.join(map(str, who))}: {text}" if ranks.size > 1 else text
        for text, who in list(by_text.items())[:_MAX_SHOWN]
    ]
    if len(by_text) > _MAX_SHOWN:
        result.wrong.append(f"and {len(by_text) - _MAX_SHOWN} more")
    tried = all(each["tried"] for each in found)
    result.status = FAILED if by_text else OK if tried else NOT_TRIED
    result.detail = found[0]["detail"]
    if len({each["raised"] for each in found}) > 1:
        # The others may be inside a collective that this one has left.
        report.ended = "a check raised on some of the ranks only, which are out of step since"


def _common_folder(ranks: Ranks, given: str | None) -> tuple[str | None, str | None]:
    """(a folder that every rank sees, the one to be deleted on this rank)."""
    made = None
    if ranks.rank == 0:
        try:
            made = tempfile.mkdtemp(prefix="distprune-selftest-", dir=given)
        except OSError as error:
            print(f"distprune selftest: no checkpoints: {error}", file=sys.stderr)
    path = ranks.share(made)[0]
    seen = ranks.share(path is not None and os.path.isdir(path))
    return (path if all(seen) else None), made


def end_process(code: int) -> None:
    """End a process that hangs, with the stacks of its threads on stderr."""
    faulthandler.dump_traceback(file=sys.stderr)
    sys.stdout.flush()
    os._exit(code)
