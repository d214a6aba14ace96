"""Results of the library, frozen as hashes: see make.py."""
