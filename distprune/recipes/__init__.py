"""Recipes: read, checked, and made into a pruner or into a recipe for a checkpoint."""
