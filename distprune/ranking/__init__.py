"""Exactly k elements: keys in one total order, and where that order is cut."""
