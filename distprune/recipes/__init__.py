"""Recipes: what they may say, how they are read and checked, and the value that they become.

Nothing imports ``form`` before a recipe is checked: pydantic is an optional dependency, and takes a
tenth of a second to import.
"""

# Scores that are made of weights and of statistics of activations.
FROM_STATISTICS = ("wanda", "stade", "ria")
# The budget that is made of statistics of activations.
BUDGET_FROM_STATISTICS = "owl"
