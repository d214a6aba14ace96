"""Recipes: what to prune, how much and when, as one value that is checked when it is made.

    recipe = Recipe(sparsity=0.5, scope="layer")  # or load_recipe("cubic_80"), or a YAML file
    pruner = ScheduledPruner.from_recipe(model, recipe)  # the model may be wrapped

A file has the same keys, all of which but ``sparsity``, ``schedule`` or ``pattern`` may be left
out; the options of ``distprune prune`` have them, too::

    score: magnitude           # what ranks weights
    scope: global              # one ranking over all selected parameters; layer: one for each of
                               # them; row: one for each output row
    normalize: rms             # what divides the scores of each parameter before they are ranked
    budget: erk                # divide the total among parameters by a rule, not by one ranking
    pattern: "2:4"             # instead of a sparsity: 2 of every 4 in a row are kept
    schedule:                  # or, at once: sparsity: 0.8
      kind: cubic              # linear; one_shot, which has step and sparsity
      begin: 0
      end: 1000
      frequency: 100
      initial_sparsity: 0.0
      final_sparsity: 0.8
    also: ["lm_head"]          # besides the default, which include would replace
    exclude: ["*.layers.0.*"]
    max_sparsity: 0.95         # of every single parameter

Making a recipe needs pydantic, and reading one from a file PyYAML: ``pip install
'distprune[recipes]'``.
"""

from distprune.recipes.loading import load_recipe, shipped_recipes
from distprune.recipes.recipe import GroupRecipe, Recipe

__all__ = ["GroupRecipe", "Recipe", "load_recipe", "shipped_recipes"]
