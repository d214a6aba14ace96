"""Whether the masks of a model are those that pruning left, and whether they act."""
