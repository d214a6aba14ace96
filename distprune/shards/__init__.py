"""Where the elements of a parameter are: geometry, placements, and reading this rank's part."""
