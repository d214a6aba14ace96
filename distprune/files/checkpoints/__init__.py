"""Checkpoint folders on disk: their location, the headers of their files, masks and statistics."""
