"""Random sequences of operations on sharded models, beside an oracle: see run.py."""
