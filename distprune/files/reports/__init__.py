"""What is written about a pruned checkpoint: report, warnings and model card."""
