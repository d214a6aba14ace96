"""What a finished pruning should make one think: said after the run, and kept in the report."""

from __future__ import annotations

from collections.abc import Sequence

from distprune.files.planning import Plan
from distprune.files.reports.report import TensorReport

# A tensor that loses more than this share is left with next to nothing.
_NEARLY_ALL = 0.99
# Weights that were trained have hardly any zeros.
_SPARSE = 0.01
_SHOWN = 5


def warnings_about(plan: Plan, tensors: Sequence[TensorReport]) -> tuple[str, ...]:
    """One sentence or two for each thing that may be wrong with a result.

    Args:
        plan: what was done.
        tensors: what became of each tensor of the plan.
    """
    return (*_nearly_empty(plan, tensors), *_sparse_before(tensors))


def _nearly_empty(plan: Plan, tensors: Sequence[TensorReport]) -> list[str]:
    """Tensors that lost nearly all, though less was asked for."""
    found = [
        tensor
        for tensor in tensors
        if tensor.num_pruned > _NEARLY_ALL * tensor.num_elements
        and plan.groups[tensor.group].num_to_prune
        <= _NEARLY_ALL * plan.groups[tensor.group].num_elements
    ]
    if not found:
        return []
    found.sort(key=lambda tensor: (-tensor.sparsity, tensor.name))
    shown = [
        f"{tensor.name} ({_percent(tensor.num_pruned, tensor.num_elements)} of "
        f"{tensor.num_elements:,} elements)"
        for tensor in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        shown.append(f"{len(found) - _SHOWN} more")
    lose = "loses" if len(found) == 1 else "lose"
    return [
        f"{', '.join(shown)} {lose} more than 99 %, because the weights are smaller than those of "
        "the other tensors. The model may be useless; limits.max_sparsity (--max-sparsity) bounds "
        "what a single tensor loses, and exclude leaves it alone."
    ]


def _sparse_before(tensors: Sequence[TensorReport]) -> list[str]:
    """Zeros in the source: they are the first to go, so less than one thinks is new."""
    num_zero = sum(tensor.num_zero for tensor in tensors)
    num_elements = sum(tensor.num_elements for tensor in tensors)
    if num_zero <= _SPARSE * num_elements:
        return []
    return [
        f"the source is sparse already: {num_zero:,} of the {num_elements:,} selected elements "
        f"({_percent(num_zero, num_elements)}) are zero in it. The sparsity that was asked for is "
        "the total, and they count towards it."
    ]


def _percent(part: int, whole: int) -> str:
    """Never 100.00 where it is not exactly that."""
    share = 100 * part / whole
    return f"{share if part == whole else min(share, 99.99):.2f} %"
