"""The form of a recipe: what it may say, how it is read from YAML, and what is wrong with it.

``form`` is the one model of a recipe, in pydantic. Recipes for models and recipes for checkpoints
are both checked by it, so it is below both. Nothing outside of this package imports ``form`` before
a recipe is checked: pydantic is an optional dependency, and takes a tenth of a second to import.
"""
