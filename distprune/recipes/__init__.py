"""Recipes: what to prune, and how much, as plain values."""
