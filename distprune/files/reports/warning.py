"""Warnings about a finished pruning, for the user and for the report.

``verify`` compares the warnings of a report: a new wording would fail existing results. So those
about raw magnitudes stay as they were before there was a normalisation; ``advice_about`` is for the
terminal alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from distprune._common.amount import collapsed
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
    is_raw = all(
        group.recipe.normalize is None
        and group.recipe.budget is None
        and group.recipe.score in ("magnitude", "random")
        for group in plan.groups
    )
    emptied = _nearly_empty(plan, tensors) if is_raw else _collapsed(plan, tensors)
    return (*emptied, *_sparse_before(tensors))


def advice_about(plan: Plan, tensors: Sequence[TensorReport]) -> str:
    """What may help if raw magnitudes emptied a tensor; "" if they did not."""
    raw = [
        tensor
        for tensor in _of_collapsed(plan, tensors)
        if plan.groups[tensor.group].recipe.normalize is None
        and plan.groups[tensor.group].recipe.is_normalizable
    ]
    if not raw:
        return ""
    shown = _shown(raw)
    are_weights = all(plan.groups[tensor.group].recipe.ranks_magnitudes for tensor in raw)
    keep = "keeps" if len(raw) == 1 else "keep"
    option = "" if plan.recipe.groups else " (--normalize rms)"
    return (
        f"{shown} {keep} at most 1 %, because raw {'magnitudes' if are_weights else 'scores'} were "
        f"ranked; normalize: rms{option} divides those of each tensor by their rms, so that "
        "tensors of different scales compare."
    )


def _of_collapsed(plan: Plan, tensors: Sequence[TensorReport]) -> list[TensorReport]:
    """The tensors that have collapsed in groups that are ranked together."""
    found: list[TensorReport] = []
    for group in plan.groups:
        members = tensors[group.first : group.last]
        if group.recipe.is_together and group.recipe.budget is None:
            counts = [(tensor.num_elements, tensor.num_pruned) for tensor in members]
            emptied = [members[position] for position in collapsed(counts)]
            found += [tensor for tensor in emptied if tensor.held_at is None]
    return found


def _collapsed(plan: Plan, tensors: Sequence[TensorReport]) -> list[str]:
    """A warning about tensors that a ranking has emptied."""
    emptied = _of_collapsed(plan, tensors)
    if not emptied:
        return []
    keep = "keeps" if len(emptied) == 1 else "keep"
    are_weights = all(group.recipe.score in ("magnitude", "random") for group in plan.groups)
    what = "normalised weights" if are_weights else "scores"
    return [
        f"{_shown(emptied)} {keep} at most 1 %, because the {what} are "
        f"smaller than those of the other tensors. The model may be useless; {_remedy(plan)}"
    ]


def _remedy(plan: Plan) -> str:
    if all(group.recipe.tile is not None for group in plan.groups):  # which have no limits
        return (
            "scope layer prunes the same share of the tiles of every tensor, and exclude leaves it "
            "alone."
        )
    return (
        "limits.max_sparsity (--max-sparsity) bounds what a single tensor loses, and exclude "
        "leaves it alone."
    )


def _shown(tensors: Sequence[TensorReport]) -> str:
    """The names of the first of some tensors, by sparsity, with what they lost."""
    in_order = sorted(tensors, key=lambda tensor: (-tensor.sparsity, tensor.name))
    shown = [
        f"{tensor.name} ({format_percent(tensor.num_pruned, tensor.num_elements)} of "
        f"{tensor.num_elements:,} elements)"
        for tensor in in_order[:_NUM_SHOWN]
    ]
    if len(tensors) > _NUM_SHOWN:
        shown.append(f"{len(tensors) - _NUM_SHOWN} more")
    return ", ".join(shown)


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
    lose = "loses" if len(emptied) == 1 else "lose"
    return [
        f"{_shown(emptied)} {lose} more than 99 %, because the weights are smaller than those of "
        f"the other tensors. The model may be useless; {_remedy(plan)}"
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
