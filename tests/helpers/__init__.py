"""Modules that several test files share; tests/README.md has a line for each."""
