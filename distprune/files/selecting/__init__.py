"""The tensors that a recipe selects, their dimensions and their groups, from headers alone."""
