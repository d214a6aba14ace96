"""Names of tensors in transformers: those of a checkpoint, and those of the loaded model."""
