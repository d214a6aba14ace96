"""Keys of scores, streamed from disk, and the cut of each group's ranking."""
