"""Exactly k elements: keys in one total order, and the search for where it is cut."""
