"""Which tensors of a checkpoint are pruned, in which group of the recipe, and why others are not.

Names and headers decide: a file does not say what a tensor is for. `base.selecting`` has the
rules for names; ``include`` replaces them, and ``also`` adds to what they select.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distprune.base.amount import CEILING, FLOOR, Bounded, to_bounds, violated_bound
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.base.selecting import ADAPTER, reason_of_shape, reason_to_keep
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import SelectionError
from distprune.files.layouts import Layouts, NoMatch, matched
from distprune.recipes import GroupRecipe, Recipe

_ADAPTER_CONFIG = "adapter_config.json"
_MAX_WARNINGS = 12  # about tensors that are left alone


class Verdict(NamedTuple):
    """Whether a tensor is pruned.

    Attributes:
        entry: the tensor.
        is_pruned: whether it takes part.
        reason: why it is left alone; "" if it is pruned.
    """

    entry: TensorEntry
    is_pruned: bool
    reason: str


@dataclass(frozen=True)
class Selection:
    """Which tensors of a checkpoint are pruned, and in which group of the recipe.

    Attributes:
        verdicts: of every tensor, in the order of the checkpoint.
        groups: per group of the recipe, its tensors in that order; one group if the recipe has
            none.
        warnings: sentences on what is no error, but probably not meant.
    """

    verdicts: tuple[Verdict, ...]
    groups: tuple[list[TensorEntry], ...]
    warnings: tuple[str, ...]


def select_tensors(checkpoint: Checkpoint, recipe: Recipe) -> Selection:
    """Decide for every tensor whether it is pruned, and in which group.

    Raises:
        SelectionError: the recipe has keys of models, a pattern of ``include``, ``also`` or
            ``input_dims`` matches nothing, a selected tensor is no plain float or does not fit the
            pattern, its inputs are along an unknown dimension, tied weights are stored twice, the
            recipe does not name the factors of an adapter, nothing is selected, or a tensor is in
            two groups; the first problem. An ``exclude`` that matches nothing is a warning.
    """
    if any(part.schedule is not None or part.names is not None for part in recipe.parts):
        raise SelectionError(
            "the recipe has schedule or names, which are for models; expected sparsity or pattern, "
            "because a checkpoint is pruned at once, and include, which matches names of tensors."
        )
    warnings: list[str] = []
    by_group = []
    for number, part in enumerate(recipe.parts):
        where = f"groups[{number}]: " if recipe.groups else ""
        try:
            verdicts, own_warnings = _select(checkpoint, part)
        except SelectionError as error:
            text = f"the selection in {checkpoint.folder}: {where}{error}"
            raise SelectionError(text) from error
        by_group.append(verdicts)
        warnings += [where + warning for warning in own_warnings]
    groups = tuple([v.entry for v in verdicts if v.is_pruned] for verdicts in by_group)
    verdicts = by_group[0] if not recipe.groups else list(map(_merged, *by_group))
    return Selection(tuple(verdicts), groups, tuple(warnings))


def _merged(*verdicts: Verdict) -> Verdict:
    """The verdict on a tensor from those of all groups."""
    entry = verdicts[0].entry
    numbers = [number for number, verdict in enumerate(verdicts) if verdict.is_pruned]
    if len(numbers) > 1:
        where = " and ".join(f"groups[{number}]" for number in numbers)
        raise SelectionError(
            f"tensor {entry.name} is in {where}; expected every tensor in one group at most, as "
            "each has a budget of its own. Exclude it from the others."
        )
    if numbers:
        return Verdict(entry, True, "")
    reasons = {verdict.reason for verdict in verdicts}
    common = reasons.pop() if len(reasons) == 1 else ""
    return Verdict(entry, False, common if common not in ("", "not included") else "in no group")


def _select(checkpoint: Checkpoint, recipe: GroupRecipe) -> tuple[list[Verdict], list[str]]:
    """Verdicts on all tensors by a recipe without groups; and warnings."""
    names = [entry.name for entry in checkpoint.tensors]
    included = matched("include", recipe.include or (), names)
    also = matched("also", recipe.also, names)
    excluded: set[str] = set()
    warnings = []
    for pattern in recipe.exclude:
        try:
            excluded |= matched("exclude", (pattern,), names)
        except NoMatch as error:
            warnings.append(str(error))
    verdicts = []
    has_include, of_shapes = recipe.include is not None, {}
    named = included if has_include else also
    for entry in checkpoint.tensors:
        is_named = entry.name in named
        if entry.name in excluded:
            reason = "excluded"
        elif has_include and not is_named:
            reason = "not included"
        else:
            if entry.shape not in of_shapes:  # there are few
                of_shapes[entry.shape] = reason_of_shape(entry.shape, recipe.min_ndim)
            reason = of_shapes[entry.shape]
            if not reason and not is_named:
                reason = reason_to_keep(entry.name, entry.shape, entry.dtype)
        verdicts.append(Verdict(entry, not reason, reason))
    selected = [verdict.entry for verdict in verdicts if verdict.is_pruned]
    if not has_include and not also:
        _refuse_adapter(checkpoint, verdicts)
    _check_entries(checkpoint, selected, recipe)
    _check_tied(checkpoint, selected)
    if not selected:
        reasons = "; ".join(sorted({verdict.reason for verdict in verdicts}))
        raise SelectionError(
            f"nothing is selected: the {len(verdicts)} tensors are left out as {reasons}."
        )
    left_out = [
        f"also: {verdict.entry.name} is left alone all the same: {verdict.reason}."
        for verdict in verdicts
        if verdict.entry.name in also and verdict.reason not in ("", "excluded")
    ]
    return verdicts, [*warnings, *left_out[:_MAX_WARNINGS]]


def _check_entries(
    checkpoint: Checkpoint, selected: Iterable[TensorEntry], recipe: GroupRecipe
) -> None:
    """Raise SelectionError if a tensor cannot be pruned by the recipe."""
    layouts = Layouts(checkpoint, recipe.input_dims.items())
    for entry in selected:
        if entry.dtype not in PLAIN_FLOATS:
            raise SelectionError(
                f"tensor {entry.name} is {entry.dtype}; expected one of "
                f"{', '.join(PLAIN_FLOATS)}. Dequantise the checkpoint, or exclude the tensor."
            )
        if recipe.needs_input_dim:
            name = f"tensor {entry.name}"
            misfit = recipe.group_rule.misfit(name, entry.shape, layouts.of(entry))
            if misfit is not None:
                raise SelectionError(misfit)


def _refuse_adapter(checkpoint: Checkpoint, verdicts: Sequence[Verdict]) -> None:
    """Raise SelectionError for an adapter, which has factors of an update, not weights."""
    is_folder = any(other.name == _ADAPTER_CONFIG for other in checkpoint.others) and all(
        file.name.startswith("adapter_model") for file in checkpoint.files
    )
    has_factors = any(verdict.reason == ADAPTER for verdict in verdicts)
    if is_folder or (has_factors and not any(verdict.is_pruned for verdict in verdicts)):
        sign = f" ({_ADAPTER_CONFIG})" if is_folder else " (names such as lora_A)"
        raise SelectionError(
            f"the checkpoint is an adapter{sign}: its tensors are factors of an update, and "
            "pruning them is seldom meant. Merge it into its model and prune that, or name the "
            "tensors to prune with include."
        )


def _check_tied(checkpoint: Checkpoint, selected: Iterable[TensorEntry]) -> None:
    """Raise SelectionError if a head and an embedding, which a model ties, would differ."""
    text = checkpoint.config.get("text_config")
    configs = [checkpoint.config, text if isinstance(text, dict) else {}]
    if not any(config.get("tie_word_embeddings") is True for config in configs):
        return
    names = [entry.name for entry in checkpoint.tensors]
    heads = [n for n in names if re.search(r"(^|\.)(lm_head|embed_out)\.", n)]
    inputs = [
        n for n in names if re.search(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.", n)
    ]
    pruned = {entry.name for entry in selected} & {*heads, *inputs}
    if heads and inputs and pruned:
        both = " and ".join(sorted(pruned))
        raise SelectionError(
            f"config.json ties {inputs[0]} and {heads[0]} (tie_word_embeddings), but both are "
            f"stored, and a model loads one of them for both. Exclude {both}."
        )


def limits_of(
    entries: Sequence[TensorEntry], recipe: GroupRecipe, num_to_prune: int
) -> list[tuple[int, int]]:
    """How many elements of each tensor have to be pruned at least, and at most.

    Args:
        entries: of a group.
        recipe: of the group.
        num_to_prune: of the group.

    Raises:
        SelectionError: the limits of a tensor contradict each other, or those of all tensors do not
            allow for the number to prune; with the numbers.
    """
    bounds = None
    if recipe.has_limits:
        try:
            bounds = to_bounds(bounded_of(entries), recipe.min_sparsity, recipe.max_sparsity)
        except ValueError as error:
            raise SelectionError(str(error)) from error
    if bounds is None:
        return [(0, entry.numel) for entry in entries]
    check_budget(num_to_prune, sum(bounds.lowest), sum(bounds.highest), recipe)
    return list(zip(bounds.lowest, bounds.highest, strict=True))


def check_budget(num_to_prune: int, lowest: int, highest: int, recipe: GroupRecipe) -> None:
    """Raise SelectionError if the limits of all tensors together do not allow for the number."""
    violated = violated_bound(num_to_prune, lowest, highest)
    budget = f"sparsity {recipe.sparsity} prunes {num_to_prune:,} elements"
    if violated == FLOOR:
        raise SelectionError(
            f"{budget}, but min_sparsity {recipe.min_sparsity} of every tensor needs {lowest:,}. "
            "Raise the sparsity, or lower min_sparsity."
        )
    if violated == CEILING:
        raise SelectionError(
            f"{budget}, but max_sparsity {recipe.max_sparsity} of every tensor leaves {highest:,} "
            "that may go. Lower the sparsity, or raise max_sparsity."
        )


def bounded_of(entries: Sequence[TensorEntry]) -> list[Bounded]:
    """The tensors, as bounds and budgets take them."""
    return [Bounded(e.name, (e.name,), e.numel, tuple(e.shape)) for e in entries]
