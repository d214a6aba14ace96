"""Checkpoint folders as they are on disk: where they are, what they hold, and their numbers."""
