"""What scores are made from besides weights: statistics of activations, or scores in files."""
