"""Pruning methods: the base class, the container, and those that come with the library."""
