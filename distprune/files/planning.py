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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distprune.base import without_garbage_collection
from distprune.base.amount import Bounded, Bounds, resolve_count, to_bounds
from distprune.base.blocks import Blocks, Layout
from distprune.base.selecting import PLAIN_FLOATS, natural_key
from distprune.files.checkpoint import Checkpoint, SourceFile, TensorEntry, open_checkpoint
from distprune.files.disk import SIDECAR
from distprune.files.errors import SelectionError, translated
from distprune.files.selecting import Layouts, Verdict, select_tensors
from distprune.recipes import ELEMENTWISE, STORED_STATISTICS, GroupRecipe, Recipe

if TYPE_CHECKING:  # numpy comes with it
    from distprune.files.statistics_file import TensorStatistics

STATISTICS_FILE = f"{SIDECAR}/{STORED_STATISTICS}"  # of a result whose scores need them
CARD_FILE = "README.md"  # the model card of a result, which is not that of its source
# Of what a plan leads to: raised when the same plan would write other bytes.
_VERSION = 4


class PlannedTensor(NamedTuple):  # which is made in a third of the time of a frozen dataclass
    """A tensor that is pruned.

    Attributes:
        entry: the tensor.
        layout: where its inputs are; None if that makes no difference.
        blocks: its rows or blocks of N:M, each of which is ranked on its own; None: the tensor is
            ranked as a whole, with others (scope "global") or alone (scope "layer").
        lowest, highest: how many of its elements have to be pruned at least, and at most.
        num_to_prune: how many of its elements become zero; None if what is stored decides.
    """

    entry: TensorEntry
    layout: Layout | None
    blocks: Blocks | None
    lowest: int
    highest: int
    num_to_prune: int | None


@dataclass(frozen=True)
class KeptValues:
    """What an update of the kept weights has made of some tensors.

    Attributes:
        facts: what decides the values, as JSON: for the digest of a plan, and for the report.
        tensors: by name, where their values are, in the dtype of the source.
        files: small ones that the result has beside its report, by name; ``facts`` lists them.
    """

    facts: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedGroup:
    """Tensors with a budget of their own.

    Attributes:
        recipe: without groups.
        tensors: in the order of ranking.
        num_elements: of these tensors.
        num_to_prune: elements that become zero, exactly.
    """

    recipe: GroupRecipe
    tensors: Sequence[PlannedTensor]
    num_elements: int
    num_to_prune: int

    @property
    def is_tallied(self) -> bool:
        """Whether the tensors are ranked by how often each of their 32,768 magnitudes occurs."""
        is_cut = self.recipe.score == "magnitude" and not self.recipe.group_rule.needs_input_dim
        dtypes = {tensor.entry.dtype for tensor in self.tensors}
        return is_cut and dtypes in ({"BF16"}, {"F16"}) and len(self.tensors) <= _MOST_TALLIED

    @property
    def limits(self) -> Bounds:
        """How many elements of each tensor have to be pruned at least, and at most."""
        return tuple(t.lowest for t in self.tensors), tuple(t.highest for t in self.tensors)


# More tensors would take more memory than a slab: about 50 KB each.
_MOST_TALLIED = 1 << 12


@dataclass(frozen=True)
class Plan:
    """What will be done; nothing has been done yet.

    Attributes:
        checkpoint: the source.
        recipe: with all defaults.
        verdicts: whether each tensor of the checkpoint is pruned, with reasons.
        groups: one for each of the recipe's, or a single one.
        warnings: sentences on what is no error, but probably not meant.
        statistics: of activations or gradients, for the tensors whose scores need them.
        given: scores from files.
        values: of kept elements, which are not those of the source.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    verdicts: Sequence[Verdict]
    groups: Sequence[PlannedGroup]
    warnings: Sequence[str] = ()
    statistics: TensorStatistics | None = None
    given: Checkpoint | None = None
    values: KeptValues | None = None

    @cached_property
    def tensors(self) -> list[PlannedTensor]:
        """The selected tensors, group by group, in the order of ranking."""
        return [tensor for group in self.groups for tensor in group.tensors]

    @property
    def num_elements(self) -> int:
        """Elements of the selected tensors."""
        return sum(group.num_elements for group in self.groups)

    @property
    def num_to_prune(self) -> int:
        """Elements that become zero, exactly."""
        return sum(group.num_to_prune for group in self.groups)

    def inputs(self) -> dict[str, Any]:
        """What decides the scores and kept values besides the source, as JSON, without paths."""
        facts: dict[str, Any] = {}
        if self.statistics is not None:
            facts["statistics"] = self.statistics.facts()
        if self.given is not None:
            facts["scores"] = {
                f.name: {"size": f.size, "header_crc32": f.header_crc, "mtime_ns": f.mtime_ns}
                for f in self.given.files
            }
        if self.values is not None:
            facts["update"] = dict(self.values.facts)
        return facts

    @cached_property
    def digest(self) -> str:
        """Of everything that decides the result: recipe, headers, sizes, times of change."""
        recipe = self.recipe.as_stored().as_values()
        moved = sorted(self.values.tensors) if self.values is not None else []
        return digest_of(self.checkpoint, _VERSION, recipe, self.inputs(), moved)

    @cached_property
    def copied(self) -> tuple[SourceFile, ...]:
        """The files without weights that are copied: all, except README.md if there is a card."""
        others = self.checkpoint.others
        return tuple(o for o in others if not (self.recipe.card and o.name == CARD_FILE))


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
        source: as for :func:`~distprune.files.checkpoint.open_checkpoint`.
        recipe: what to prune.
        values: of kept elements, in place of those of the source.
        awaits_statistics: the plan only tells what will be done once there are statistics.

    Raises:
        CheckpointError: the checkpoint, or a file that scores are made from, is malformed or of an
            unsupported kind; the first problem.
        SelectionError: the recipe, or what scores are made from, does not fit it; the first
            problem.

    Cost: reads headers, and statistics of activations; some milliseconds for a hundred files.
    """
    checkpoint = open_checkpoint(source)
    verdicts, warnings = select_tensors(checkpoint, recipe)
    groups: list[PlannedGroup] = []
    for number, part in enumerate(recipe.parts):
        entries = [entry for entry, group, _ in verdicts if group == number]
        try:
            groups.append(_plan_group(entries, part, Layouts(checkpoint, part.input_dims)))
        except SelectionError as error:
            where = f"groups[{number}]: " if recipe.groups else ""
            raise SelectionError(f"{where}{error}") from error
    statistics = given = None
    if not awaits_statistics:
        statistics, given = _find_statistics(recipe, groups), _find_scores(recipe, groups)
    warnings += [] if statistics is None else statistics.warnings
    return Plan(checkpoint, recipe, verdicts, groups, warnings, statistics, given, values)


def _plan_group(entries: list[TensorEntry], recipe: GroupRecipe, layouts: Layouts) -> PlannedGroup:
    entries = sorted(entries, key=lambda entry: (natural_key(entry.name), entry.name))
    sizes = [entry.numel for entry in entries]
    rule = recipe.group_rule
    has_blocks = rule.needs_input_dim
    of_tensors = [layouts.of(entry) if has_blocks else None for entry in entries]
    blocks = list(map(rule.blocks, sizes, of_tensors))
    counts: Sequence[int | None] = [None] * len(entries)
    if recipe.is_global:
        assert recipe.sparsity is not None  # a recipe has a pattern N:M, or a sparsity
        num_to_prune = resolve_count(recipe.sparsity, sum(sizes))
    else:
        known = [own.num_pruned_of(size) for own, size in zip(blocks, sizes, strict=True)]
        counts, num_to_prune = known, sum(known)
    bounded = [Bounded(e.name, (e.name,), e.numel, tuple(e.shape)) for e in entries]
    lowest, highest = _limits_of(bounded, recipe, num_to_prune) or ([0] * len(entries), sizes)
    if recipe.budget in ("uniform", "erk"):
        from distprune.budgets import divided, lines_of

        counts = divided(lines_of(recipe.budget, bounded), lowest, highest, num_to_prune)
    ranked = blocks if has_blocks else [None] * len(entries)
    facts = zip(entries, of_tensors, ranked, lowest, highest, counts, strict=True)
    tensors = [PlannedTensor(*each) for each in facts]
    return PlannedGroup(recipe, tensors, sum(sizes), num_to_prune)


def _limits_of(tensors: Sequence[Bounded], recipe: GroupRecipe, num_to_prune: int) -> Bounds | None:
    """How many elements of each tensor of a group have to be pruned at least, and at most.

    Raises:
        SelectionError: the limits of a tensor contradict each other, or those of all tensors do not
            allow for the number to prune; with the numbers.
    """
    if not recipe.has_limits:
        return None
    from distprune.ranking.ranking import limits_for

    with translated(SelectionError):
        bounds = to_bounds(tensors, recipe.min_sparsity, recipe.max_sparsity)
        sizes = [tensor.num_elements for tensor in tensors]
        return bounds and limits_for(num_to_prune, bounds, sizes, sizes)


def _find_statistics(recipe: Recipe, groups: Sequence[PlannedGroup]) -> TensorStatistics | None:
    """The statistics that scores of some groups are made from, if any are."""
    measured = [group for group in groups if group.recipe.reads_statistics]
    if not measured:
        return None
    of_gradients = are_of_gradients(group.recipe for group in measured)
    if recipe.statistics is None:
        part = measured[0].recipe
        need = f"score {part.score}" if part.needs_statistics else f"budget {part.budget}"
        raise SelectionError(
            f"{need} needs statistics of {'gradients' if of_gradients else 'activations'}; "
            "expected --statistics FILE, or 'statistics' in the recipe: the file that "
            f"`distprune calibrate{' --gradients' * of_gradients}` writes. For a language "
            "model, --text FILE makes them."
        )
    from distprune.files.statistics_file import match_statistics

    pairs = [(tensor.entry, tensor.layout) for group in measured for tensor in group.tensors]
    return match_statistics(recipe.statistics, pairs, of_gradients)


def _find_scores(recipe: Recipe, groups: Sequence[PlannedGroup]) -> Checkpoint | None:
    """The scores of single weights that files hold for some groups, if any need them."""
    scored = [t.entry for group in groups if group.recipe.reads_scores for t in group.tensors]
    if not scored:
        return None
    check_scores(recipe)
    assert recipe.scores is not None
    given = open_checkpoint(recipe.scores)
    found = {entry.name: entry for entry in given.tensors}
    for entry in scored:
        scores = found.get(entry.name)
        if scores is None or scores.shape != entry.shape or scores.dtype not in PLAIN_FLOATS:
            has = "no scores" if scores is None else f"{scores.dtype} {list(scores.shape)}"
            raise SelectionError(
                f"{recipe.scores} has {has} of {entry.name}; expected {list(entry.shape)}, of one "
                f"of {', '.join(PLAIN_FLOATS)}. Add them, or exclude the tensor."
            )
    return given


def check_scores(recipe: Recipe, made: Collection[str] = ()) -> None:
    """Raise SelectionError if a score needs scores of single weights, and nothing says where.

    Args:
        recipe: the whole of it.
        made: scores that will be made.
    """
    missing = [p.score for p in recipe.parts if p.reads_scores and p.score not in made]
    if missing and recipe.scores is None:
        made_by = " For a language model, --text FILE makes them."
        raise SelectionError(
            f"score {missing[0]} needs scores; expected --scores FOLDER, or 'scores' in the "
            "recipe: safetensors files with a tensor of the same name and shape for each pruned "
            f"one.{made_by if missing[0] in ELEMENTWISE else ''}"
        )


def are_of_gradients(parts: Iterable[GroupRecipe]) -> bool:
    """Whether the statistics that parts of a recipe need are of gradients; all need one kind."""
    needs: dict[bool, str] = {}
    for part in parts:
        if part.needs_statistics:
            needs.setdefault(part.reads_gradients, f"score {part.score}")
        if part.budget == "owl":
            needs.setdefault(False, f"budget {part.budget}")
    if len(needs) > 1:
        raise SelectionError(
            f"{needs[True]} needs statistics of gradients and {needs[False]} those of activations, "
            "and a pruning reads one file of statistics; expected one of the two."
        )
    return True in needs


def digest_of(checkpoint: Checkpoint, *facts: Any) -> str:
    """Of everything that decides a result: the source, and more as JSON."""
    return hashlib.sha256(json.dumps([source_facts(checkpoint), *facts]).encode()).hexdigest()


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
    total = 0
    given = {} if plan.given is None else {e.name: e.nbytes for e in plan.given.tensors}
    for group in plan.groups:
        recipe, weights = group.recipe, sum(tensor.entry.nbytes for tensor in group.tensors)
        if recipe.score == "ria":  # needs the sums of rows and columns first
            total += 2 * weights
        if recipe.group_rule.needs_input_dim or recipe.score == "random":
            continue
        is_divided = recipe.divisor is not None and not group.is_tallied
        num_reads = 1 + 2 * is_divided + 3 * (recipe.budget == "owl")
        if recipe.reads_scores:  # of 32 bits, if the plan awaits them
            weights = sum(given.get(t.entry.name, 4 * t.entry.numel) for t in group.tensors)
        total += num_reads * weights
    return total
