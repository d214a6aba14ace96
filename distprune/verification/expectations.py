"""What the caller of ``verify`` expects to be pruned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from distprune._common.naming import checked_pair, label_of, tied_places
from distprune.call.report import PruningReport
from distprune.verification.entries import SharedEntry
from distprune.verification.report import VerificationReport

Expected = VerificationReport | PruningReport | Iterable[str | tuple[nn.Module, str]]


@dataclass
class ExpectedParameter:
    """A parameter that has to be pruned.

    Attributes:
        name: fully qualified, if it has a full name.
        places: the (module, name) pairs at which it occurs; None if only its name is known.
        num_pruned, fingerprint: of its mask; None if any mask will do.
    """

    name: str
    places: tuple[tuple[nn.Module, str], ...] | None = None
    num_pruned: int | None = None
    fingerprint: int | None = None


def expected_parameters(expected: Expected) -> list[ExpectedParameter]:
    """Parameters, names or a report in one form."""
    if isinstance(expected, VerificationReport | PruningReport):
        unnamed = [entry.name for entry in expected.parameters if entry.name.endswith(")")]
        if unnamed:
            raise ValueError(
                f"expected is a report of parameters without full names ({unnamed[0]}); expected "
                "one of parameters that select(model) lists, or the list of them."
            )
        return [
            ExpectedParameter(
                entry.name, None, entry.num_pruned, getattr(entry, "fingerprint", None)
            )
            for entry in expected.parameters
        ]
    if isinstance(expected, str):
        expected = [expected]
    return [_expected_parameter(position, entry) for position, entry in enumerate(expected)]


def _expected_parameter(position: int, entry: Any) -> ExpectedParameter:
    if isinstance(entry, str):
        return ExpectedParameter(entry)
    kinds = "full names, or (module, name) pairs as select(model) lists them"
    checked_pair(entry, f"expected[{position}]", kinds)
    return ExpectedParameter(label_of(entry, position), tuple(tied_places(entry)))


def compare_with_reports(
    shared: Iterable[SharedEntry], expected: Iterable[ExpectedParameter]
) -> None:
    """Add problems where counts or fingerprints are not those of the expected report."""
    by_name = {entry.name: entry for entry in shared}
    for parameter in expected:
        entry = by_name.get(parameter.name)
        if entry is None or not entry.num_elements or parameter.num_pruned is None:
            continue
        if entry.num_pruned != parameter.num_pruned:
            entry.problems.append(
                f"{entry.num_pruned} of its elements are pruned; expected {parameter.num_pruned}, "
                "as in the report"
            )
        elif parameter.fingerprint not in (None, entry.fingerprint):
            entry.problems.append("its pruned elements are not those of the expected report")
