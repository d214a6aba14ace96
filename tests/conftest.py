"""Make distprune importable from a checkout; the ranks' processes copy this sys.path."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from distprune.testing import preload  # noqa: E402

preload("pytest", "torch.nn.utils.prune")
