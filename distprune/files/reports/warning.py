"""Warnings about a finished pruning, for the user and for the report.

``verify`` compares the warnings of a report: a new wording would fail existing results.
"""

from __future__ import annotations

from collections.abc import Sequence

from distprune.files.planning import Plan
from distprune.files.reports.report import TensorReport
from distprune.files.text import format_percent

# A tensor is nearly empty if more than this fraction of it was pruned.
_NEARLY_ALL = 0.99
# A source is sparse if more than this fraction is zero: trained weights have hardly any zeros.
_SPARSE = 0.01
_NUM_SHOWN = 5


def warnings_about(plan: Plan, tensors: Sequence[TensorReport]) -> tuple[str, ...]:
    """One or two sentences for each thing that may be wrong with a result.

    Args:
        plan: of the result.
        tensors: counts of each tensor of the plan.
    """
    return (*_nearly_empty(plan, tensors), *_sparse_before(tensors))


def _nearly_empty(plan: Plan, tensors: Sequence[TensorReport]) -> list[str]:
    """A warning about tensors that lost nearly all, in groups that did not."""
    emptied = [
        tensor
        for tensor in tensors
        if tensor.num_pruned > _NEARLY_ALL * tensor.num_elements
        and plan.groups[tensor.group].num_to_prune
        <= _NEARLY_ALL * plan.groups[tensor.group].num_elements
    ]
    if not emptied:
        return []
    emptied.sort(key=lambda tensor: (-tensor.sparsity, tensor.name))
    shown = [
        f"{tensor.name} ({format_percent(tensor.num_pruned, tensor.num_elements)} of "
        f"{tensor.num_elements:,} elements)"
        for tensor in emptied[:_NUM_SHOWN]
    ]
    if len(emptied) > _NUM_SHOWN:
        shown.append(f"{len(emptied) - _NUM_SHOWN} more")
    lose = "loses" if len(emptied) == 1 else "lose"
    return [
        f"{', '.join(shown)} {lose} more than 99 %, because the weights are smaller than those of "
        "the other tensors. The model may be useless; limits.max_sparsity (--max-sparsity) bounds "
        "what a single tensor loses, and exclude leaves it alone."
    ]


def _sparse_before(tensors: Sequence[TensorReport]) -> list[str]:
    """A warning about zeros in the source: they are pruned first, so fewer weights change."""
    num_zero = sum(tensor.num_zero for tensor in tensors)
    num_elements = sum(tensor.num_elements for tensor in tensors)
    if num_zero <= _SPARSE * num_elements:
        return []
    return [
        f"the source is sparse already: {num_zero:,} of the {num_elements:,} selected elements "
        f"({format_percent(num_zero, num_elements)}) are zero in it. The sparsity that was "
        "asked for is the total, and they count towards it."
    ]
