"""What a self-test prints: versions, one line for each wrapping, and what does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OK, FAILED, NOT_TRIED = "ok", "FAILED", "not tried"


@dataclass
class Result:
    """One check on one wrapping.

    Attributes:
        wrapping, check: their names; no check where the wrapping could not be tried.
        status: ``OK``, ``FAILED`` or ``NOT_TRIED``.
        detail: what was measured, or why it was not tried.
        wrong: what does not hold, rank by rank.
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
    """All that a self-test found.

    Attributes:
        facts: what a bug report starts with: versions, device, backend, ranks.
        results: in the order in which they were found.
        ended: why not all checks ran; None if they did.
        seconds: in all, without importing torch.
    """

    facts: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    ended: str | None = None
    seconds: float = 0.0

    def of_status(self, status: str) -> list[Result]:
        """The results of one status."""
        return [result for result in self.results if result.status == status]

    @property
    def holds(self) -> bool:
        """Whether everything that was tried holds, and everything was tried that could be."""
        return self.ended is None and not self.of_status(FAILED)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {"holds": self.holds, **asdict(self)}


class Lines:
    """The text of a report, line by line, as the results come.

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
        """One wrapping."""
        if results[0].check is None:
            return self._row(wrapping, [f"not tried: {results[0].detail}"])
        by_check = {result.check: result for result in results}
        cells = []
        for check in self._checks:
            result = by_check.get(check)
            status = NOT_TRIED if result is None else result.status
            cells.append("-" if status == NOT_TRIED else status)
            if result is not None and status == OK:
                cells[-1] = result.detail or OK
        return self._row(wrapping, cells)

    def end(self, report: Report) -> str:
        """What was not tried, what does not hold, and the answer."""
        lines = [""]
        reasons: dict[tuple[str, str], list[str]] = {}
        for each in report.of_status(NOT_TRIED):
            if each.check is not None:
                reasons.setdefault((each.check, each.detail), []).append(each.wrapping)
        for (check, reason), wrappings in reasons.items():
            lines.append(f'not tried: "{check}" on {", ".join(wrappings)}: {reason}')
        failed = report.of_status(FAILED)
        for each in failed:
            lines += [f'FAILED: "{each.check}" on {each.wrapping}', *_indented(each.wrong)]
        if report.ended is not None:
            lines.append(f"ended early: {report.ended}")
        num_tried = len(failed) + len(report.of_status(OK))
        took = f"{report.seconds:.1f} s"
        if report.holds:
            lines.append(f"Everything that was tried holds: {num_tried} checks, {took}.")
        else:
            lines.append(f"{len(failed)} of {num_tried} checks FAILED, {took}.")
        return "\n".join(lines).removeprefix("\n" if len(lines) == 1 else "")

    def _row(self, name: str, cells: Sequence[str]) -> str:
        widths = [max(len(check), 8) + 2 for check in self._checks]
        padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=False)]
        return (f"{name:<{self._width}}" + "".join(padded)).rstrip()


def _indented(texts: Sequence[str]) -> list[str]:
    return ["    " + line for text in texts for line in text.splitlines()]
