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
from distprune.base.blocks import Layout
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.base.selecting import ADAPTER, reason_of_shape, reason_to_keep
from distprune.files.checkpoints.checkpoint import Checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import MAX_PROBLEMS, SelectionError, headline, shown
from distprune.files.layouts import Layouts, UnknownLayout, matched
from distprune.files.recipe import FileRecipe

_ADAPTER_CONFIG = "adapter_config.json"
# Elements between neighbours along the inputs: a pass has a counter for each.
_MAX_STRIDE = 1 << 22


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


def select_tensors(checkpoint: Checkpoint, recipe: FileRecipe) -> Selection:
    """Decide for every tensor whether it is pruned, and in which group.

    Raises:
        SelectionError: with every problem of every group: an ``include``, an ``also`` or an
            ``input_dims`` that matches nothing, a selected tensor that is no plain float or does
            not fit the pattern, inputs along an unknown dimension, tied weights stored twice, an
            adapter that the recipe does not name, nothing selected; or tensors that are in two
            groups. An ``exclude`` that matches nothing is a warning.
    """
    subject = f"the selection in {checkpoint.folder}"
    problems: list[str] = []
    warnings: list[str] = []
    by_group = []
    for number, part in enumerate(recipe.parts):
        where = f"groups[{number}]: " if recipe.groups else ""
        verdicts, own_problems, own_warnings = _select(checkpoint, part)
        by_group.append(verdicts)
        problems += [where + problem for problem in own_problems]
        warnings += [where + warning for warning in own_warnings]
    if problems:
        raise SelectionError(headline(subject, problems), problems)
    groups = tuple([v.entry for v in verdicts if v.is_pruned] for verdicts in by_group)
    if not recipe.groups:
        return Selection(tuple(by_group[0]), groups, tuple(warnings))
    merged = [_merged(of_tensor, problems) for of_tensor in zip(*by_group, strict=True)]
    if problems:
        details = shown(problems, "more tensors are in two groups.")
        raise SelectionError(headline(subject, problems), details)
    return Selection(tuple(merged), groups, tuple(warnings))


def _merged(verdicts: Sequence[Verdict], problems: list[str]) -> Verdict:
    """The verdict on a tensor from those of all groups; a problem if it is in two."""
    entry = verdicts[0].entry
    numbers = [number for number, verdict in enumerate(verdicts) if verdict.is_pruned]
    if len(numbers) > 1:
        where = " and ".join(f"groups[{number}]" for number in numbers)
        problems.append(
            f"tensor {entry.name} is in {where}; expected every tensor in one group at most, as "
            "each has a budget of its own. Exclude it from the others."
        )
    if numbers:
        return Verdict(entry, True, "")
    reasons = {verdict.reason for verdict in verdicts}
    common = reasons.pop() if len(reasons) == 1 else ""
    return Verdict(entry, False, common if common not in ("", "not included") else "in no group")


def _select(
    checkpoint: Checkpoint, recipe: FileRecipe
) -> tuple[list[Verdict], list[str], list[str]]:
    """Verdicts on all tensors by a recipe without groups; problems, and warnings."""
    names = [entry.name for entry in checkpoint.tensors]
    problems: list[str] = []
    unmatched: list[str] = []
    included = matched("include", recipe.include or (), names, problems)
    also = matched("also", recipe.also, names, problems)
    excluded = matched("exclude", recipe.exclude, names, unmatched)
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
    problems += _adapter_problems(checkpoint, recipe, verdicts)
    bad = _entry_problems(checkpoint, selected, recipe)
    problems += shown(bad, "more tensors have the same problems.")
    problems += _tied_problems(checkpoint, selected)
    if not selected and not problems:
        reasons = sorted({verdict.reason for verdict in verdicts})
        problems.append(
            f"nothing is selected: the {len(verdicts)} tensors are left out as "
            f"{'; '.join(reasons)}."
        )
    if problems:  # what is no error by itself may be the cause of one
        return verdicts, [*problems, *unmatched], []
    left_out = [
        f"also: {verdict.entry.name} is left alone all the same: {verdict.reason}."
        for verdict in verdicts
        if verdict.entry.name in also and verdict.reason not in ("", "excluded")
    ]
    return verdicts, [], [*unmatched, *left_out[:MAX_PROBLEMS]]


def _entry_problems(
    checkpoint: Checkpoint, selected: Iterable[TensorEntry], recipe: FileRecipe
) -> list[str]:
    """Problems of single tensors; tensors of several layers share a sentence."""
    problems: dict[str, None] = {}
    try:
        layouts = Layouts(checkpoint, recipe.input_dims)
    except SelectionError as error:
        return [str(error)]
    needs_input_dim = recipe.needs_input_dim
    for entry in selected:
        if entry.dtype not in PLAIN_FLOATS:
            problem = (
                f"tensor {entry.name} is {entry.dtype}; expected one of "
                f"{', '.join(PLAIN_FLOATS)}. Dequantise the checkpoint, or exclude the tensor."
            )
            problems[problem] = None
        elif needs_input_dim:
            try:
                layout = layouts.of(entry)
            except UnknownLayout as error:
                problems[str(error)] = None
            else:
                wrong = _layout_problem(entry, layout, recipe)
                problems |= {} if wrong is None else {wrong: None}
    return list(problems)


def _layout_problem(entry: TensorEntry, layout: Layout, recipe: FileRecipe) -> str | None:
    if layout.columns > 1 and layout.stride > _MAX_STRIDE:
        return (
            f"tensor {entry.name} {list(entry.shape)} has {layout.stride} elements between "
            f"neighbouring inputs; expected {_MAX_STRIDE} at most. Exclude it."
        )
    return recipe.group_rule.misfit(f"tensor {entry.name}", entry.shape, layout)


def _adapter_problems(
    checkpoint: Checkpoint, recipe: FileRecipe, verdicts: Sequence[Verdict]
) -> list[str]:
    """An adapter has factors of an update, not weights of a layer: pruning it is hardly meant."""
    if recipe.include is not None or recipe.also:
        return []
    is_folder = any(other.name == _ADAPTER_CONFIG for other in checkpoint.others) and all(
        file.name.startswith("adapter_model") for file in checkpoint.files
    )
    has_factors = any(verdict.reason == ADAPTER for verdict in verdicts)
    if is_folder or (has_factors and not any(verdict.is_pruned for verdict in verdicts)):
        sign = f" ({_ADAPTER_CONFIG})" if is_folder else " (names such as lora_A)"
        return [
            f"the checkpoint is an adapter{sign}: its tensors are factors of an update, and "
            "pruning them is seldom meant. Merge it into its model and prune that, or name the "
            "tensors to prune with include."
        ]
    return []


def _tied_problems(checkpoint: Checkpoint, selected: Iterable[TensorEntry]) -> list[str]:
    """A tied embedding and head are one tensor in the model; stored twice, they would differ."""
    text = checkpoint.config.get("text_config")
    configs = [checkpoint.config, text if isinstance(text, dict) else {}]
    if not any(config.get("tie_word_embeddings") is True for config in configs):
        return []
    names = [entry.name for entry in checkpoint.tensors]
    heads = [n for n in names if re.search(r"(^|\.)(lm_head|embed_out)\.", n)]
    inputs = [
        n for n in names if re.search(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.", n)
    ]
    pruned = {entry.name for entry in selected} & {*heads, *inputs}
    if heads and inputs and pruned:
        names_of_both = " and ".join(sorted(pruned))
        return [
            f"config.json ties {inputs[0]} and {heads[0]} (tie_word_embeddings), but both are "
            f"stored, and a model loads one of them for both. Exclude {names_of_both}."
        ]
    return []


def limits_of(
    entries: Sequence[TensorEntry], recipe: FileRecipe, num_to_prune: int
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


def check_budget(num_to_prune: int, lowest: int, highest: int, recipe: FileRecipe) -> None:
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
