"""Recipes: what to prune, how much and when, as a file that is checked before anything runs.

    recipe = load_recipe("cubic_80")  # or the path of a YAML file
    pruner = recipe.pruner(model)  # a ScheduledPruner; the model may be wrapped

A recipe in full; only ``version`` and one of ``sparsity``, ``schedule`` and ``pattern`` are
required::

    version: 1
    score: magnitude           # or random; "method" means the same
    seed: 0                    # of random
    scope: global              # one ranking over all selected parameters; layer: one for each of
                               # them; row: one for each output row
    budget: erk                # divide the total among parameters by a rule, not by one ranking:
                               # uniform or erk; not beside a pattern
    pattern: "2:4"             # instead of a sparsity: 2 of every 4 in a row are kept
    schedule:                  # or, at once: sparsity: 0.8
      kind: cubic              # linear; one_shot, which has step and sparsity
      begin: 0
      end: 1000
      frequency: 100
      initial_sparsity: 0.0
      final_sparsity: 0.8
    select:                    # as for distprune.select
      also: ["lm_head"]        # besides the default, which include would replace
      exclude: ["*.layers.0.*"]
      min_ndim: 2              # leave alone tensors of fewer dimensions larger than 1
      names: [weight]          # only parameters of these names, for models
      input_dims: {"*.w1": 0}  # the dimension of the inputs, for rows and patterns
    limits:                    # of every single parameter; not beside a pattern
      min_sparsity: 0.0
      max_sparsity: 0.95

The command line prunes checkpoints by the same recipes. A checkpoint is pruned at once, so its
recipe has ``sparsity`` or ``pattern``. These keys are for checkpoints only::

    score: wanda               # |w| times the rms of its input; stade: times its deviation;
                               # ria: relative importance times the rms; fisher: by factors
    budget: owl                # layers with more outliers lose less
    statistics: a.safetensors  # of activations, for wanda, stade, ria and owl; of gradients, for
                               # fisher; relative to the recipe
    scores: FOLDER             # for score given: tensors of the same names and shapes
    nan: keep                  # keep NaN; error, the default, refuses weights that have any
    output: {masks: true, card: true}  # whether to write the masks and a model card
    groups: [...]              # parts of the checkpoint with budgets of their own: each group has a
                               # select, and whatever of sparsity, score, scope, pattern and limits
                               # differs from the top level

Checking a recipe needs pydantic, and reading one from a file PyYAML: ``pip install
'distprune[recipes]'``. Only making a pruner needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distprune.recipes import BUDGET_FROM_STATISTICS, RecipeError
from distprune.recipes.request import Request, shipped_recipes

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from distprune.call.request import Decision, PruningCall
    from distprune.methods.base import BasePruningMethod
    from distprune.schedule.pruner import ScheduledPruner

__all__ = ["Recipe", "RecipeError", "Request", "load_recipe", "parse_recipe", "shipped_recipes"]


@dataclass(frozen=True)
class Recipe(Request):
    """A checked recipe, with the fields of :class:`Request`. ``repr`` shows every default."""

    groups: tuple[Recipe, ...] = ()

    def pruner(self, model: nn.Module, *, group: ProcessGroup | None = None) -> ScheduledPruner:
        """A pruner for a model that is wrapped already, if it is to be. Changes nothing yet.

        Args:
            model: plain, or wrapped in anything that distprune supports.
            group: the ranks that take part; every rank by default.

        Raises:
            ValueError: a pattern matches nothing; the recipe has keys that are for checkpoints
                only.
        """
        from distprune.api.select import select
        from distprune.methods.builtin import L1Unstructured
        from distprune.schedule.pruner import ScheduledPruner

        if names := self._only_for_checkpoints():
            raise ValueError(
                f"the recipe has {', '.join(names)}; expected none of that for a model, because "
                "it says what to do with a checkpoint. `distprune prune` prunes checkpoints."
            )
        assert self.budget != "owl"
        bounds: dict[str, Any] = {"min_sparsity": self.min_sparsity}
        bounds["max_sparsity"] = self.max_sparsity
        bounds = bounds if self.has_limits else {}
        if self.budget is not None:
            from distprune import budgets

            rule = budgets.erk if self.budget == "erk" else budgets.uniform
            bounds = {"budget": partial(rule, **bounds)}
        return ScheduledPruner(
            select(
                model,
                self.include,
                self.exclude,
                names=self.names,
                also=self.also,
                min_ndim=self.min_ndim,
            ),
            self.course,
            pruning_method=_random(self.seed) if self.score == "random" else L1Unstructured,
            group=group,
            normalize=self.normalize,
            **bounds,
            scope=self.scope,
            pattern=self.pattern,
            input_dims=dict(self.input_dims),
        )

    def _only_for_checkpoints(self) -> list[str]:
        """The keys of a recipe that a pruner does not support."""
        names = ["groups"] if self.groups else []
        if self.score not in ("magnitude", "random"):
            names.append(f"score {self.score!r}")
        if self.budget == BUDGET_FROM_STATISTICS:
            names.append(f"budget {BUDGET_FROM_STATISTICS!r}")
        if self.nan != "error":
            names.append(f"nan {self.nan!r}")
        if not self.masks:
            names.append("output.masks")
        if not self.card:
            names.append("output.card")
        return names


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe from a YAML file; needs PyYAML (``pip install 'distprune[recipes]'``).

    Args:
        path: of the file, or the name of a recipe that comes with distprune, such as "cubic_80".
            Relative paths in the recipe start at its folder.

    Raises:
        RecipeError: with every problem, its line, what was found and what was expected.
        FileNotFoundError: there is no such file.
        ImportError: PyYAML or pydantic is missing.
    """
    return Recipe.load(path)


def parse_recipe(mapping: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values, as YAML or JSON would have them; needs pydantic.

    Raises:
        RecipeError: with every problem, what was found and what was expected.
        ImportError: pydantic is missing.
    """
    return Recipe.parse(mapping)


def _random(seed: int | None) -> type[BasePruningMethod]:
    """RandomUnstructured that starts from the seed at every step.

    An element's score is then the same at every step: the elements pruned earlier have the lowest
    scores, and a resumed run continues as if it had not stopped.
    """
    import torch

    from distprune.methods.builtin import RandomUnstructured
    from distprune.methods.ranking import AT_RANDOM, rank

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
