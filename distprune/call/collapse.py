"""Layers that a ranking over all parameters has emptied: what counts as one, and the warning.

What has collapsed is said in _common/amount.py, for files too. Not counted here are parameters of
fewer than two dimensions (biases often begin at zero), those for which the caller asked for it, by
a budget or a bound, and those that had collapsed before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from distprune._common.amount import collapsed, is_nearly_empty
from distprune.call.report import ParameterReport, PruningReport

_SHOWN = 5


def find_collapsed(
    entries: Sequence[ParameterReport], shapes: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """The names of the parameters that a call has emptied.

    Args:
        entries: of all parameters of the call.
        shapes: of the whole parameters.
    """
    emptied = collapsed([(entry.num_elements, entry.num_pruned) for entry in entries])
    return tuple(
        entries[position].name
        for position in emptied
        if _is_new(entries[position], shapes[position])
    )


def warn_of_collapse(report: PruningReport) -> None:
    """Warn of the collapsed parameters of a report, where the caller of the caller stands."""
    if not report.collapsed:
        return
    entries = {entry.name: entry for entry in report.parameters}
    shown = [
        f"{name} (now {entries[name].sparsity:.2%} pruned, of {entries[name].num_elements:,} "
        "elements)"
        for name in report.collapsed[:_SHOWN]
    ]
    if len(report.collapsed) > _SHOWN:
        shown.append(f"and {len(report.collapsed) - _SHOWN} more")
    few = "this parameter" if len(report.collapsed) == 1 else "these parameters"
    warnings.warn(
        f"the ranking over all parameters has left hardly anything of {', '.join(shown)}, where "
        f"{report.sparsity:.2%} of all elements are pruned: the scores of {few} are smaller than "
        "those of the others, and the model may be useless. Compare the parameters by "
        "normalize='rms', divide the amount among them by budget= ('lamp', for example), or bound "
        "what each may lose by max_sparsity=.",
        stacklevel=3,
    )


def _is_new(entry: ParameterReport, shape: Sequence[int]) -> bool:
    """Whether a parameter that has collapsed did so by this call, and nobody asked for it."""
    return (
        len(shape) >= 2
        and entry.held_at is None
        and entry.wanted is None
        and (entry.min_sparsity is None or entry.min_sparsity < 0.99)
        and not is_nearly_empty(entry.num_elements, entry.num_pruned_before)
    )
