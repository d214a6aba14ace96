"""The parts of `prune_language_model.py` and of `compare_on_language_model.py`."""
