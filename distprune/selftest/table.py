"""The text of a self-test: versions, one line for each wrapping, and the problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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
