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
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distprune.base import without_garbage_collection
from distprune.base.amount import CEILING, FLOOR, Bounded, resolve_count, to_bounds, violated_bound
from distprune.base.blocks import Blocks, Layout
from distprune.base.float_formats import PLAIN_FLOATS
from distprune.base.selecting import natural_key
from distprune.files.checkpoint import SIDECAR, Checkpoint, OtherFile, TensorEntry, open_checkpoint
from distprune.files.errors import CheckpointError, SelectionError
from distprune.files.selecting import Layouts, Verdict, select_tensors
from distprune.recipes import GroupRecipe, Recipe
from distprune.recipes.recipe import ELEMENTWISE, STORED_STATISTICS

if TYPE_CHECKING:  # numpy comes with it
    from distprune.files.statistics_file import TensorStatistics

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
class KeptValues:
    """What an update of the kept weights has made of some tensors.

    Attributes:
        facts: what decides the values, as JSON: the digest of a plan covers them.
        tensors: the names of the tensors.
        folder: safetensors files with these tensors, in the dtype of the source; None: nobody reads
            them, as where a result is compared with its checksums.
    """

    facts: Mapping[str, Any]
    tensors: tuple[str, ...]
    folder: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """For a report, and for :meth:`from_json`."""
        return {**self.facts, "tensors": list(self.tensors)}

    @classmethod
    def from_json(cls, values: Any) -> KeptValues:
        """What :meth:`as_json` has made; raises CheckpointError if it was something else."""
        try:
            facts = dict(values)
            return cls(facts, tuple(map(str, facts.pop("tensors"))))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "the report names no tensors whose kept values were changed."
            ) from error

    @cached_property
    def names(self) -> Collection[str]:
        """The tensors, for lookups."""
        return frozenset(self.tensors)


@dataclass(frozen=True)
class ScoreInputs:
    """What scores are made from besides weights, and kept values from besides the source.

    Attributes:
        statistics: of activations or gradients, for the tensors that need them.
        given: scores from files.
        values: of kept elements, which are not those of the source.
    """

    statistics: TensorStatistics | None = None
    given: Checkpoint | None = None
    values: KeptValues | None = None

    @cached_property
    def given_entries(self) -> dict[str, TensorEntry]:
        """The given scores, by name of the tensor."""
        return {} if self.given is None else {entry.name: entry for entry in self.given.tensors}

    def facts(self) -> dict[str, Any]:
        """What decides the scores, as JSON, without paths: for digests and reports."""
        facts: dict[str, Any] = {}
        if self.statistics is not None:
            facts["statistics"] = self.statistics.facts()
        if self.given is not None:
            facts["scores"] = {
                f.name: {"size": f.size, "header_crc32": f.header_crc, "mtime_ns": f.mtime_ns}
                for f in self.given.files
            }
        if self.values is not None:
            facts["update"] = self.values.as_json()
        return facts


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
        source: as for :func:`~distprune.files.checkpoint.open_checkpoint`.
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
    names = {verdict.entry.name for verdict in selection.verdicts}
    inputs = ScoreInputs() if awaits_statistics else _find_inputs(recipe, tensors, names)
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
    pairs = list(zip(entries, of_tensors, strict=True))
    blocks = [rule.blocks(entry.numel, layout) for entry, layout in pairs]
    of_each: Sequence[int | None] = [None] * len(entries)
    if recipe.is_global:
        assert recipe.sparsity is not None  # a recipe has a pattern N:M, or a sparsity
        num_to_prune = resolve_count(recipe.sparsity, num_elements)
    else:
        counts = [own.num_pruned_of(e.numel) for own, e in zip(blocks, entries, strict=True)]
        of_each, num_to_prune = counts, sum(counts)
    bounded = [Bounded(e.name, (e.name,), e.numel, tuple(e.shape)) for e in entries]
    limits = _limits_of(bounded, recipe, num_to_prune)
    if recipe.budget in ("uniform", "erk"):
        from distprune.budgets import divided, lines_of

        lowest, highest = zip(*limits, strict=True)
        lines = lines_of(recipe.budget, bounded)
        of_each = divided(lines, lowest, highest, num_to_prune)
    tensors, offset = [], 0
    for (entry, layout), own, limit, count in zip(pairs, blocks, limits, of_each, strict=True):
        ranked = own if needs_input_dim else None
        tensors.append(PlannedTensor(entry, recipe, number, layout, offset, ranked, *limit, count))
        offset += entry.numel
    has_limits = any((t.lowest, t.highest) != (0, t.entry.numel) for t in tensors)
    last = first + len(tensors)
    return tensors, PlannedGroup(recipe, first, last, num_elements, num_to_prune, has_limits)


def _limits_of(
    tensors: Sequence[Bounded], recipe: GroupRecipe, num_to_prune: int
) -> list[tuple[int, int]]:
    """How many elements of each tensor of a group have to be pruned at least, and at most.

    Raises:
        SelectionError: the limits of a tensor contradict each other, or those of all tensors do not
            allow for the number to prune; with the numbers.
    """
    bounds = None
    if recipe.has_limits:
        try:
            bounds = to_bounds(tensors, recipe.min_sparsity, recipe.max_sparsity)
        except ValueError as error:
            raise SelectionError(str(error)) from error
    if bounds is None:
        return [(0, tensor.num_elements) for tensor in tensors]
    lowest, highest = sum(bounds.lowest), sum(bounds.highest)
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
    return list(zip(bounds.lowest, bounds.highest, strict=True))


def _find_inputs(
    recipe: Recipe, tensors: Sequence[PlannedTensor], names: Collection[str]
) -> ScoreInputs:
    """Find what the scores of some tensors are made from.

    Args:
        names: of all tensors of the checkpoint.
    """
    statistics = given = None
    if measured := [tensor for tensor in tensors if tensor.recipe.reads_statistics]:
        of_gradients = are_of_gradients(tensor.recipe for tensor in measured)
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

        pairs = [(tensor.entry, tensor.layout) for tensor in measured]
        statistics = match_statistics(recipe.statistics, pairs, names, of_gradients)
    if scored := [tensor.entry for tensor in tensors if tensor.recipe.reads_scores]:
        check_scores(recipe)
        assert recipe.scores is not None
        given = open_checkpoint(recipe.scores)
        found = {entry.name: entry for entry in given.tensors}
        for entry in scored:
            scores = found.get(entry.name)
            if scores is None:
                raise SelectionError(
                    f"{recipe.scores} has no scores of {entry.name}; add them, or exclude the "
                    "tensor."
                )
            if scores.shape != entry.shape or scores.dtype not in PLAIN_FLOATS:
                raise SelectionError(
                    f"the scores of {entry.name} in {recipe.scores} are {scores.dtype} "
                    f"{list(scores.shape)}; expected {list(entry.shape)}, of one of "
                    f"{', '.join(PLAIN_FLOATS)}."
                )
    return ScoreInputs(statistics, given)


def check_scores(recipe: Recipe, made: Collection[str] = ()) -> None:
    """Raise SelectionError if a score needs scores of single weights, and nothing says where.

    Args:
        recipe: the whole of it.
        made: scores that will be made.
    """
    missing = [p.score for p in recipe.parts if p.reads_scores and p.score not in made]
    if missing and recipe.scores is None:
        text = ""
        if missing[0] in ELEMENTWISE:
            text = " For a language model, --text FILE makes them."
        raise SelectionError(
            f"score {missing[0]} needs scores; expected --scores FOLDER, or 'scores' in the "
            "recipe: safetensors files with a tensor of the same name and shape for each pruned "
            f"one.{text}"
        )


def are_of_gradients(parts: Iterable[GroupRecipe]) -> bool:
    """Whether the statistics that parts of a recipe need are of gradients; all need one kind."""
    needs: dict[bool, str] = {}
    for part in parts:
        of_activations = not part.reads_gradients or part.budget == "owl"
        if part.needs_statistics:
            needs.setdefault(part.reads_gradients, f"score {part.score}")
        if of_activations:
            needs.setdefault(False, f"budget {part.budget}")
    if len(needs) > 1:
        raise SelectionError(
            f"{needs[True]} needs statistics of gradients and {needs[False]} those of activations, "
            "and a pruning reads one file of statistics; expected one of the two."
        )
    return True in needs


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
        entries = [plan.inputs.given_entries[entry.name] for entry in entries]
    num_bytes = sum(entry.nbytes for entry in entries)
    of_outliers = 3 * num_bytes if recipe.budget == "owl" else 0
    return num_reads * num_bytes + of_outliers
