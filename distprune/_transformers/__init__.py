"""Names of transformers: those of a checkpoint, and those of the model that is made of it."""
