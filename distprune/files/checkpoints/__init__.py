"""Checkpoint folders on disk: their location, their files, and the numbers of their tensors."""
