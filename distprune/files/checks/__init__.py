"""What ``verify`` compares: files, claims, counts and the order of the cut."""
