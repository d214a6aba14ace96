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
    pattern: "4x4"             # prune whole tiles of 4 outputs and 4 inputs; or, instead of a
                               # sparsity, "2:4": 2 of every 4 in a row are kept
    schedule:                  # or, at once: sparsity: 0.8
      kind: cubic              # linear; one_shot, which has step and sparsity
      begin: 0
      end: 1000
      frequency: 100
      initial_sparsity: 0.0
      final_sparsity: 0.8
    select:                    # as for distprune.select
      include: ["*"]
      exclude: [lm_head]
      names: [weight]
      input_dims: {"*.w1": 0}  # the dimension of the inputs, for rows and patterns
    limits:                    # of every single parameter; not beside a pattern
      min_sparsity: 0.0
      max_sparsity: 0.95

``groups``, a list, gives parts of the model budgets of their own. Each group has a ``select`` and
whatever of ``sparsity`` or ``schedule``, ``score``, ``scope``, ``pattern`` and ``limits`` differs
from the top level.

The command line prunes checkpoints by the same recipes. A checkpoint is pruned at once, so its
recipe has ``sparsity`` or ``pattern``. These keys are for checkpoints only::

    score: wanda               # |w| times the rms of its input; stade: times its deviation
    statistics: a.safetensors  # of activations, for wanda and stade; relative to the recipe
    scores: FOLDER             # for score given: tensors of the same names and shapes
    nan: keep                  # keep NaN; error, the default, refuses weights that have any
    select:
      also: ["lm_head"]        # pruned in addition to the default, which include would replace
      min_ndim: 2              # leave alone tensors of fewer dimensions larger than 1
    output: {masks: true, card: true}  # whether to write the masks and a model card

Checking a recipe needs pydantic, and reading one from a file PyYAML: ``pip install
'distprune[recipes]'``. Only making a pruner needs torch.
"""

from distprune._recipe_form.problems import RecipeError
from distprune._recipe_form.values import n_of_m
from distprune.recipes.groups import RecipeGroup
from distprune.recipes.reading import load_recipe, parse_recipe
from distprune.recipes.records import Recipe
from distprune.recipes.shipped import shipped_recipes

__all__ = [
    "Recipe",
    "RecipeError",
    "RecipeGroup",
    "load_recipe",
    "n_of_m",
    "parse_recipe",
    "shipped_recipes",
]
