"""The report of ``verify``, and its error."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from distprune.base.report_text import CallReport, share, table


@dataclass(frozen=True)
class VerifiedParameter:
    """One parameter, whole, each element counted once.

    Attributes:
        name: fully qualified.
        num_elements: of the whole parameter; 0 if no rank could read it.
        num_pruned: elements under the mask.
        fingerprint: int64, of the mask; no sharding changes it. 0 if nothing is pruned.
        problems: what is wrong with it, and on which ranks.
    """

    name: str
    num_elements: int
    num_pruned: int
    fingerprint: int
    problems: tuple[str, ...] = ()

    @property
    def sparsity(self) -> float:
        """Share of pruned elements, in [0, 1]."""
        return share(self.num_pruned, self.num_elements)


@dataclass(frozen=True)
class VerificationReport(CallReport):
    """What ``verify`` found. The same on every rank except for ``seconds``: print it on one.

    Attributes:
        parameters: all that are pruned or should be, in the order of the model.
        problems: what is wrong with the model as a whole.
        num_ranks: ranks that took part.
        num_collectives: all-reduces that this rank took part in.
        bytes_sent: their payload, per rank.
        seconds: wall time on this rank.
    """

    parameters: tuple[VerifiedParameter, ...]
    problems: tuple[str, ...]
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.all_problems

    @property
    def all_problems(self) -> tuple[str, ...]:
        """The problems of the model, and those of the parameters with their names."""
        return (
            *self.problems,
            *(f"{entry.name}: {text}" for entry in self.parameters for text in entry.problems),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the totals and sparsities written out."""
        data = asdict(self)
        data["parameters"] = [
            {**asdict(entry), "sparsity": entry.sparsity} for entry in self.parameters
        ]
        for name in ("ok", "num_elements", "num_pruned", "sparsity"):
            data[name] = getattr(self, name)
        return data

    def to_json(self, **options: Any) -> str:
        """:meth:`to_dict` as JSON; ``options`` go to ``json.dumps``."""
        return json.dumps(self.to_dict(), allow_nan=False, **options)

    def __str__(self) -> str:
        heading = ("parameter", "elements", "pruned", "sparsity", "")
        rows = [
            (
                entry.name,
                f"{entry.num_elements:,}",
                f"{entry.num_pruned:,}",
                f"{entry.sparsity:.2%}",
                f"{len(entry.problems)} wrong" if entry.problems else "ok",
            )
            for entry in self.parameters
        ]
        total = (
            "total", f"{self.num_elements:,}", f"{self.num_pruned:,}", f"{self.sparsity:.2%}", "",
        )  # fmt: skip
        count = len(self.all_problems)
        verdict = "nothing is wrong" if self.ok else f"{count} problem{'s' if count > 1 else ''}"
        return "\n".join(
            [
                *table(heading, rows, total, left_columns=(0, len(heading) - 1)),
                "; ".join([verdict, *self._cost()]),
                *(f"- {text}" for text in self.all_problems),
            ]
        )


class VerificationError(RuntimeError):
    """Masks do not act, or are not those that the last pruning left; the same on every rank.

    Attributes:
        report: the whole report; the message lists the first 20 problems.
    """

    _MAX_SHOWN = 20

    def __init__(self, report: VerificationReport) -> None:
        self.report = report
        problems = report.all_problems
        shown = list(problems[: self._MAX_SHOWN])
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more: see the error's report")
        super().__init__(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''} with the masks of the "
            "model:\n" + "\n".join(f"- {text}" for text in shown)
        )

    def __reduce__(self) -> Any:
        return VerificationError, (self.report,)
