"""What a verification found: the same on every rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


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
        return self.num_pruned / self.num_elements if self.num_elements else 0.0


@dataclass(frozen=True)
class VerificationReport:
    """What ``verify`` found. ``print`` it on one rank; but for ``seconds`` it is the same on all.

    Attributes:
        parameters: all that are pruned or should be, in the order of the model.
        problems: what is wrong with the model as a whole.
        num_ranks: that took part.
        num_collectives: all-reduces that this rank took part in.
        bytes_sent: their payload, per rank.
        seconds: wall time on this rank.
        recomputed: with ``reference``, parameters whose selection was repeated.
        not_recomputed: with ``reference``, "name: why not" of all others.
    """

    parameters: tuple[VerifiedParameter, ...]
    problems: tuple[str, ...]
    num_ranks: int
    num_collectives: int
    bytes_sent: int
    seconds: float
    recomputed: tuple[str, ...] = ()
    not_recomputed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.all_problems

    @property
    def all_problems(self) -> tuple[str, ...]:
        """Of the model, and of every parameter with its name."""
        return (
            *self.problems,
            *(f"{entry.name}: {text}" for entry in self.parameters for text in entry.problems),
        )

    @property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(entry.num_elements for entry in self.parameters)

    @property
    def num_pruned(self) -> int:
        """Pruned elements of all parameters."""
        return sum(entry.num_pruned for entry in self.parameters)

    @property
    def sparsity(self) -> float:
        """Share of pruned elements over all parameters, in [0, 1]."""
        return self.num_pruned / self.num_elements if self.num_elements else 0.0

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
        rows = [("parameter", "elements", "pruned", "sparsity", "")]
        rows += [
            (
                entry.name,
                f"{entry.num_elements:,}",
                f"{entry.num_pruned:,}",
                f"{entry.sparsity:.2%}",
                f"{len(entry.problems)} wrong" if entry.problems else "ok",
            )
            for entry in self.parameters
        ]
        rows.append(
            ("total", f"{self.num_elements:,}", f"{self.num_pruned:,}", f"{self.sparsity:.2%}", "")
        )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:-1]), last]).rstrip()
            for first, *rest, last in rows
        ]
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}"
        traffic = f"{self.num_collectives} collectives, {self.bytes_sent:,} bytes per rank"
        count = len(self.all_problems)
        verdict = "nothing is wrong" if self.ok else f"{count} problem{'s' if count > 1 else ''}"
        return "\n".join(
            [
                lines[0],
                rule,
                *lines[1:-1],
                rule,
                lines[-1],
                f"{verdict}; {ranks}; {traffic}; {self.seconds:.3g} s",
                *(f"- {text}" for text in self.all_problems),
                *self._recomputation(),
            ]
        )

    def _recomputation(self) -> list[str]:
        lines = []
        if self.recomputed:
            lines.append(f"selected anew, by sorting: {len(self.recomputed)} parameters")
        return lines + [f"not selected anew: {text}" for text in self.not_recomputed]


class VerificationError(RuntimeError):
    """Masks do not act, or are not those that pruning left; the same text on every rank.

    Attributes:
        report: what was found.
    """

    # Of so many the text tells; the report has them all.
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
