"""Runs all checks in sequence, each with a deadline, and collects the findings of all ranks."""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
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
from distprune.selftest.checks import CHECKS, Findings, NotTried
from distprune.selftest.models import WRAPPINGS, Case
from distprune.selftest.ranks import LostError, Ranks
from distprune.selftest.table import FAILED, NOT_TRIED, OK, Report, Result
from distprune.torch_private.private_fields import TESTED

_MARGIN = 20.0  # seconds after a deadline, so that the backend and the store time out first
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
        alarm = threading.Timer(ranks.timeout + _MARGIN, stuck, [partial_report])
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
