"""What the jobs of this folder have in common."""
