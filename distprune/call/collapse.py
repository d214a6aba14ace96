"""Layers that a ranking over all parameters has emptied: what counts as one, and the warning.

[Note: collapse] A parameter has collapsed if a call leaves it at most 1 % of its elements, and all
parameters of the call together at least 10 % of theirs: so it is at least ten times as sparse in
what it keeps as the whole. On a pretrained language model, a raw global ranking by Wanda scores
pruned one matrix to 99 % where 30 % were asked for, and the perplexity rose fourfold; with scores
divided by their rms no matrix went above 52 %. Not counted are parameters of fewer than two
dimensions (biases often begin at zero), those for which the caller asked for it, by a budget or a
bound, and those that had collapsed before. A model that is pruned to more than 90 % as a whole is
expected to have nearly empty layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from distprune.call.report import ParameterReport, PruningReport

_SHOWN = 5


def find_collapsed(
    entries: Sequence[ParameterReport], shapes: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """The names of the parameters that a call has emptied: see [Note: collapse].

    Args:
        entries: of all parameters of the call.
        shapes: of the whole parameters.
    """
    num_pruned = sum(entry.num_pruned for entry in entries)
    if 10 * num_pruned > 9 * sum(entry.num_elements for entry in entries):
        return ()
    return tuple(
        entry.name
        for entry, shape in zip(entries, shapes, strict=True)
        if len(shape) >= 2
        and entry.held_at is None
        and entry.wanted is None
        and (entry.min_sparsity is None or entry.min_sparsity < 0.99)
        and _is_nearly_all(entry.num_pruned, entry.num_elements)
        and not _is_nearly_all(entry.num_pruned_before, entry.num_elements)
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


def _is_nearly_all(num_pruned: int, num_elements: int) -> bool:
    return num_elements > 0 and 100 * num_pruned >= 99 * num_elements
