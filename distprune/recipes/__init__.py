"""Recipes for checkpoints on disk; those for models are distprune.recipe."""
