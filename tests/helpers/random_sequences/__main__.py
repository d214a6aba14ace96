"""Repeat one random sequence: see run.py."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from helpers.random_sequences.run import main  # noqa: E402

sys.exit(main())
