"""What has to be pruned in a model, as the caller of ``verify`` says it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from distprune._common.naming import unwrap
from distprune.call.report import PruningReport
from distprune.verification.report import VerificationReport
from distprune.verification.sharing import Shared

Expected = VerificationReport | PruningReport | Iterable[str | tuple[nn.Module, str]]


@dataclass
class Wanted:
    """A parameter that has to be pruned."""

    name: str
    places: tuple[tuple[nn.Module, str], ...] | None = None
    num_pruned: int | None = None
    fingerprint: int | None = None


def wanted_of(expected: Expected) -> list[Wanted]:
    """Parameters, names or a report in one form.

    Raises:
        TypeError, ValueError: what cannot name a parameter.
    """
    if isinstance(expected, VerificationReport | PruningReport):
        unnamed = [entry.name for entry in expected.parameters if entry.name.endswith(")")]
        if unnamed:
            raise ValueError(
                f"expected is a report of parameters without full names ({unnamed[0]}); expected "
                "one of parameters that select(model) lists, or the list of them."
            )
        return [
            Wanted(entry.name, None, entry.num_pruned, getattr(entry, "fingerprint", None))
            for entry in expected.parameters
        ]
    if isinstance(expected, str):
        expected = [expected]
    found = []
    for position, each in enumerate(expected):
        if isinstance(each, str):
            found.append(Wanted(each))
            continue
        try:
            module, name = each
        except (TypeError, ValueError):
            module = name = None
        if not isinstance(module, nn.Module) or not isinstance(name, str):
            raise TypeError(
                f"expected[{position}] is a {type(each).__name__}; expected full names, or "
                "(module, name) pairs as select(model) lists them."
            )
        places = getattr(each, "places", ((module, name),))
        label = getattr(each, "fqn", f"{type(unwrap(module)).__name__}.{name} (#{position})")
        found.append(Wanted(label, tuple((unwrap(m), n) for m, n in places)))
    return found


def compare_with_reports(shared: Iterable[Shared], wanted: Iterable[Wanted]) -> None:
    """Enter where counts and fingerprints are not those of a report that was given."""
    by_name = {entry.name: entry for entry in shared}
    for each in wanted:
        entry = by_name.get(each.name)
        if entry is None or not entry.num_elements or each.num_pruned is None:
            continue
        if entry.num_pruned != each.num_pruned:
            entry.problems.append(
                f"{entry.num_pruned} of its elements are pruned; expected {each.num_pruned}, as in "
                "the report"
            )
        elif each.fingerprint not in (None, entry.fingerprint):
            entry.problems.append("its pruned elements are not those of the expected report")
