"""A recipe for a model, as a ScheduledPruner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from distprune.api.select import select
from distprune.methods.builtin import L1Unstructured, RandomUnstructured
from distprune.methods.ranking import rank
from distprune.methods.rankings import AT_RANDOM
from distprune.schedule.pruner import ScheduledPruner

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from distprune.call.context import Decision, PruningCall
    from distprune.methods.base import BasePruningMethod
    from distprune.recipes.groups import RecipeGroup


def make_pruner(
    groups: Sequence[RecipeGroup], seed: int | None, model: nn.Module, group: ProcessGroup | None
) -> ScheduledPruner:
    """Make a pruner; see :meth:`distprune.recipe.Recipe.pruner`.

    Args:
        groups: with the scope and the pattern that they have from the recipe.
        seed, model, group: of the recipe, and as there.
    """
    return ScheduledPruner([_entry(part, seed, model) for part in groups], group=group)


def _entry(part: RecipeGroup, seed: int | None, model: nn.Module) -> dict[str, Any]:
    """A group of a recipe, as ScheduledPruner takes it."""
    entry: dict[str, Any] = {
        "parameters": select(model, part.include, part.exclude, names=part.names),
        "schedule": part.schedule,
        "pruning_method": _random(seed) if part.method == "random" else L1Unstructured,
        "normalize": part.normalize,
        "input_dims": dict(part.input_dims),
    }
    scope = part.scope or "global"
    if part.pattern is not None:
        return entry | {"pattern": "{}:{}".format(*part.pattern)}
    if part.tile is not None:
        return entry | {"pattern": "{}x{}".format(*part.tile), "scope": scope}
    if scope != "global":
        return entry | {"scope": scope}
    return entry | {"min_sparsity": part.min_sparsity, "max_sparsity": part.max_sparsity}


def _random(seed: int | None) -> type[BasePruningMethod]:
    """RandomUnstructured that starts from the seed at every step.

    An element's score is then the same at every step: the elements pruned earlier have the lowest
    scores, and a resumed run continues as if it had not stopped.
    """
    if seed is None:
        return RandomUnstructured

    class SeededRandom(RandomUnstructured):
        def decide(self, call: PruningCall) -> Decision:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return rank(call, self.amount, AT_RANDOM)

    # Ranks compare the names of their methods.
    SeededRandom.__qualname__ = f"SeededRandom(seed={seed})"
    return SeededRandom
