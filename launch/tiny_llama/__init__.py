"""The parts of `prune_tiny_llama.py`, one stage of the job per file."""
