"""The plan: what a recipe does to a checkpoint, from headers alone.

[Note: order] Elements are ranked by (score, position of the tensor, row-major index), as in the
library. A folder says nothing of the order in which a model lists its parameters, so the order of
tensors is that of their names, "layers.2" before "layers.10": the order that
``global_unstructured(..., pipeline_parallel=True)`` uses, on one process too. With the names of the
model's parameters both make the same masks, ties included.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from distprune._common.amount import resolve_count
from distprune._common.natural_order import natural_key
from distprune.files.checkpoint import Checkpoint, open_checkpoint
from distprune.files.header import TensorEntry
from distprune.files.policy import Choice, choose, input_groups
from distprune.files.recipe import FileRecipe

# Of what a plan leads to: raised when the same plan would write other bytes.
_VERSION = 1


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is pruned.

    Attributes:
        entry: the tensor.
        offset: elements of the selected tensors before it.
        num_groups: how many groups of elements are ranked on their own in it; 0: it is ranked
            together with the others (scope "global").
        num_pruned_per_group: ... and how many go in each.
    """

    entry: TensorEntry
    offset: int
    num_groups: int
    num_pruned_per_group: int


@dataclass(frozen=True)
class Plan:
    """What will be done; nothing has been done yet.

    Attributes:
        checkpoint: the source.
        recipe: with all defaults.
        choices: of every tensor in the checkpoint, with reasons.
        tensors: the selected ones, in the order of ranking.
        num_elements: of the selected tensors.
        num_to_prune: exactly so many become zero.
        digest: of all that decides the output: recipe, headers, sizes, times of change.
    """

    checkpoint: Checkpoint
    recipe: FileRecipe
    choices: tuple[Choice, ...]
    tensors: tuple[PlannedTensor, ...]
    num_elements: int
    num_to_prune: int
    digest: str


def plan(source: str | Path, recipe: FileRecipe) -> Plan:
    """Read the headers of a checkpoint and decide what to prune.

    Raises:
        CheckpointError: the checkpoint is malformed or of an unsupported kind; all problems.
        SelectionError: the recipe does not fit it; all problems.

    Cost: reads headers only; some milliseconds for a hundred files.
    """
    checkpoint = open_checkpoint(source)
    choices = choose(checkpoint, recipe)
    selected = [choice.entry for choice in choices if choice.is_pruned]
    selected.sort(key=lambda entry: (natural_key(entry.name), entry.name))
    tensors, offset = [], 0
    for entry in selected:
        tensors.append(PlannedTensor(entry, offset, *_groups(entry, recipe)))
        offset += entry.numel
    if recipe.scope == "global" and recipe.pattern is None:
        num_to_prune = resolve_count(recipe.sparsity, offset)
    else:
        num_to_prune = sum(t.num_groups * t.num_pruned_per_group for t in tensors)
    return Plan(
        checkpoint=checkpoint,
        recipe=recipe,
        choices=tuple(choices),
        tensors=tuple(tensors),
        num_elements=offset,
        num_to_prune=num_to_prune,
        digest=_digest(checkpoint, recipe),
    )


def _groups(entry: TensorEntry, recipe: FileRecipe) -> tuple[int, int]:
    """How many groups a tensor has, and how many elements each of them loses."""
    if recipe.kept_of is not None:
        kept, group = recipe.kept_of
        return entry.numel // group, group - kept
    if recipe.scope == "layer":
        return 1, resolve_count(recipe.sparsity, entry.numel)
    if recipe.scope == "row":
        outputs = input_groups(entry)[0]
        return outputs, resolve_count(recipe.sparsity, entry.numel // outputs)
    return 0, 0


def _digest(checkpoint: Checkpoint, recipe: FileRecipe) -> str:
    facts = {
        "version": _VERSION,
        "recipe": asdict(recipe),
        "weights": [[f.name, f.size, f.mtime_ns, f.header_crc] for f in checkpoint.files],
        "others": [[f.name, f.size, f.mtime_ns] for f in checkpoint.others],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
