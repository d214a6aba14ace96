"""The report, the warnings and the model card of a pruned checkpoint."""
