"""The plan: what a recipe does to a checkpoint, from headers alone.

[Note: order] Elements are ranked by (score, position of the tensor, row-major index), as in a live
model. A folder does not say in which order a model lists its parameters, so tensors are in the
order of their names, "layers.2" before "layers.10": the order that
``global_unstructured(..., pipeline_parallel=True)`` uses, on one process too. If the names are
those of the model's parameters, both make the same masks, ties included. If a recipe has groups,
the tensors of one group follow those of another, and each group is ranked by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from distprune.base.amount import resolve_count
from distprune.base.blocks import Blocks, Layout
from distprune.base.garbage import without_garbage_collection
from distprune.base.selecting import natural_key
from distprune.files.checkpoints.checkpoint import SIDECAR, Checkpoint, OtherFile, open_checkpoint
from distprune.files.checkpoints.header import TensorEntry
from distprune.files.errors import SelectionError
from distprune.files.layouts import Layouts
from distprune.files.scoring import KeptValues, ScoreInputs, find_inputs
from distprune.files.selecting import Verdict, bounded_of, limits_of, select_tensors
from distprune.recipes import GroupRecipe, Recipe
from distprune.recipes.recipe import STORED_STATISTICS

STATISTICS_FILE = f"{SIDECAR}/{STORED_STATISTICS}"  # of a result whose scores need them
CARD_FILE = "README.md"  # the model card of a result, which is not that of its source
MAX_CARD_BYTES = 8 << 20  # a larger README.md is no card, and is copied as it is
# Of what a plan leads to: raised when the same plan would write other bytes.
_VERSION = 3


class PlannedTensor(NamedTuple):  # which is made in a third of the time of a frozen dataclass
    """A tensor that is pruned.

    Attributes:
        entry: the tensor.
        recipe: of the group of the plan that it is in.
        group: number of that group.
        layout: where its inputs are; None if that makes no difference.
        offset: elements of the tensors before it in its group.
        blocks: its rows or blocks of N:M, each of which is ranked on its own; None: the tensor is
            ranked as a whole, with others (scope "global") or alone (scope "layer").
        lowest, highest: how many of its elements have to be pruned at least, and at most.
        num_to_prune: how many of its elements become zero; None if what is stored decides.
    """

    entry: TensorEntry
    recipe: GroupRecipe
    group: int
    layout: Layout | None
    offset: int
    blocks: Blocks | None
    lowest: int
    highest: int
    num_to_prune: int | None


@dataclass(frozen=True)
class PlannedGroup:
    """Tensors with a budget of their own.

    Attributes:
        recipe: without groups.
        first, last: its tensors are ``plan.tensors[first:last]``.
        num_elements: of these tensors.
        num_to_prune: elements that become zero, exactly.
        has_limits: whether the limits of a tensor may decide how much it loses.
    """

    recipe: GroupRecipe
    first: int
    last: int
    num_elements: int
    num_to_prune: int
    has_limits: bool

    @property
    def in_blocks(self) -> bool:
        """Whether each row, or each block of N:M, is ranked on its own."""
        return self.recipe.needs_input_dim


@dataclass(frozen=True)
class Plan:
    """What will be done; nothing has been done yet.

    Attributes:
        checkpoint: the source.
        recipe: with all defaults.
        verdicts: whether each tensor of the checkpoint is pruned, with reasons.
        tensors: the selected ones, group by group, in the order of ranking.
        groups: one for each of the recipe's, or a single one.
        num_elements: of the selected tensors.
        num_to_prune: elements that become zero, exactly.
        digest: of everything that decides the output: recipe, headers, sizes, times of change.
        warnings: sentences on what is no error, but probably not meant.
        inputs: what scores are made from besides weights; the digest covers them.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    verdicts: tuple[Verdict, ...]
    tensors: tuple[PlannedTensor, ...]
    groups: tuple[PlannedGroup, ...]
    num_elements: int
    num_to_prune: int
    digest: str
    warnings: tuple[str, ...] = ()
    inputs: ScoreInputs = field(default_factory=ScoreInputs, compare=False)

    @cached_property
    def has_card(self) -> bool:
        """Whether README.md of the result is a model card that describes the pruning."""
        return self.recipe.card and not any(
            other.name.startswith(CARD_FILE + "/")
            or (other.name == CARD_FILE and other.size > MAX_CARD_BYTES)
            for other in self.checkpoint.others
        )

    @cached_property
    def copied(self) -> tuple[OtherFile, ...]:
        """The files without weights that are copied: all, except README.md if there is a card."""
        others = self.checkpoint.others
        if not self.has_card:
            return others
        return tuple(other for other in others if other.name != CARD_FILE)


@without_garbage_collection()
def plan(
    source: str | Path,
    recipe: Recipe,
    *,
    values: KeptValues | None = None,
    awaits_statistics: bool = False,
) -> Plan:
    """Read the headers of a checkpoint and decide what to prune.

    Args:
        source: as for :func:`~distprune.files.checkpoints.checkpoint.open_checkpoint`.
        recipe: what to prune.
        values: of kept elements, in place of those of the source.
        awaits_statistics: the plan only tells what will be done once there are statistics.

    Raises:
        CheckpointError: the checkpoint, or a file that scores are made from, is malformed or of an
            unsupported kind; all problems.
        SelectionError: the recipe, or what scores are made from, does not fit it; all problems.

    Cost: reads headers, and statistics of activations; some milliseconds for a hundred files.
    """
    checkpoint = open_checkpoint(source)
    selection = select_tensors(checkpoint, recipe)
    tensors: list[PlannedTensor] = []
    groups: list[PlannedGroup] = []
    for entries, part in zip(selection.groups, recipe.parts, strict=True):
        layouts = Layouts(checkpoint, part.input_dims.items())
        try:
            planned, group = _plan_group(entries, part, layouts, len(groups), len(tensors))
        except SelectionError as error:
            where = f"groups[{len(groups)}]: " if recipe.groups else ""
            raise SelectionError(f"{where}{error}") from error
        tensors += planned
        groups.append(group)
    scored = [(tensor.recipe, tensor.entry, tensor.layout) for tensor in tensors]
    names = {verdict.entry.name for verdict in selection.verdicts}
    inputs = ScoreInputs() if awaits_statistics else find_inputs(recipe, scored, names)
    inputs = replace(inputs, values=values)
    return Plan(
        checkpoint=checkpoint,
        recipe=recipe,
        verdicts=selection.verdicts,
        tensors=tuple(tensors),
        groups=tuple(groups),
        num_elements=sum(group.num_elements for group in groups),
        num_to_prune=sum(group.num_to_prune for group in groups),
        digest=digest_of(checkpoint, recipe, inputs.facts()),
        warnings=(*selection.warnings, *(inputs.statistics.warnings if inputs.statistics else ())),
        inputs=inputs,
    )


def _plan_group(
    entries: list[TensorEntry], recipe: GroupRecipe, layouts: Layouts, number: int, first: int
) -> tuple[list[PlannedTensor], PlannedGroup]:
    entries = sorted(entries, key=lambda entry: (natural_key(entry.name), entry.name))
    num_elements = sum(entry.numel for entry in entries)
    rule = recipe.group_rule
    needs_input_dim = rule.needs_input_dim
    of_tensors = [layouts.of(entry) if needs_input_dim else None for entry in entries]
    pairs = zip(entries, of_tensors, strict=True)
    counts = [rule.counts(entry.numel, layout) for entry, layout in pairs]
    if recipe.is_global:
        assert recipe.sparsity is not None  # a recipe has a pattern N:M, or a sparsity
        num_to_prune = resolve_count(recipe.sparsity, num_elements)
    else:
        num_to_prune = sum(num_blocks * num_pruned for num_blocks, num_pruned in counts)
    limits = limits_of(entries, recipe, num_to_prune)
    of_each: Sequence[int | None] = [None] * len(entries)
    if not recipe.is_global:
        of_each = [num_blocks * num_pruned for num_blocks, num_pruned in counts]
    if recipe.budget in ("uniform", "erk"):
        from distprune.budgets import divided, lines_of

        lowest, highest = zip(*limits, strict=True)
        lines = lines_of(recipe.budget, bounded_of(entries))
        of_each = divided(lines, lowest, highest, num_to_prune)
    tensors, offset = [], 0
    for entry, layout, (_, num_pruned), limit, count in zip(
        entries, of_tensors, counts, limits, of_each, strict=True
    ):
        blocks = None
        if needs_input_dim:
            blocks = rule.blocks(entry.numel, layout, num_pruned)
        tensors.append(PlannedTensor(entry, recipe, number, layout, offset, blocks, *limit, count))
        offset += entry.numel
    has_limits = any((t.lowest, t.highest) != (0, t.entry.numel) for t in tensors)
    last = first + len(tensors)
    return tensors, PlannedGroup(recipe, first, last, num_elements, num_to_prune, has_limits)


def digest_of(checkpoint: Checkpoint, recipe: Recipe, inputs: Mapping[str, Any]) -> str:
    """Of everything that decides the output: recipe, names, sizes, headers and times of change.

    Args:
        checkpoint: the source.
        recipe: its paths do not count.
        inputs: :meth:`ScoreInputs.facts` of what scores are made from.
    """
    facts: dict[str, Any] = {"version": _VERSION, "recipe": recipe.as_stored().as_values()}
    facts |= source_facts(checkpoint)
    if inputs:
        facts["inputs"] = inputs
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def source_facts(checkpoint: Checkpoint) -> dict[str, list[list[str | int]]]:
    """Names, sizes, times of change and headers of all files, for a digest."""
    return {
        "weights": [[f.name, f.size, f.mtime_ns, f.header_crc] for f in checkpoint.files],
        "others": [[f.name, f.size, f.mtime_ns] for f in checkpoint.others],
    }


def bytes_to_count(plan: Plan) -> int:
    """Bytes that are read, over all ranks, to cut the groups that are not ranked by blocks.

    More if the keys around a cut do not fit into memory, or the limits of many tensors hold them.
    """
    together = sum(_bytes_of_group(plan, each) for each in plan.groups if not each.in_blocks)
    # Relative importance needs the sums of rows and columns first.
    return together + sum(2 * t.entry.nbytes for t in plan.tensors if t.recipe.score == "ria")


def _bytes_of_group(plan: Plan, group: PlannedGroup) -> int:
    recipe = group.recipe
    if recipe.score == "random":
        return 0
    num_reads = 1 + 2 * (recipe.divisor is not None)
    entries = [tensor.entry for tensor in plan.tensors[group.first : group.last]]
    if recipe.reads_scores:
        if plan.inputs.given is None:  # the plan awaits them, in 32 bits
            return num_reads * 4 * group.num_elements
        entries = [plan.inputs.given.entries[entry.name] for entry in entries]
    num_bytes = sum(entry.nbytes for entry in entries)
    of_outliers = 3 * num_bytes if recipe.budget == "owl" else 0
    return num_reads * num_bytes + of_outliers
