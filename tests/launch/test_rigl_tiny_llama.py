"""The comparison of RigL with masks that stay, with so few steps that it takes seconds.

With 300 steps on 2 ranks (7 minutes) the losses were 2.255 for RigL and 2.284 for masks that stay.
"""

import re

import pytest
from shell import ROOT, run


@pytest.mark.slow
@pytest.mark.thorough
def test_a_short_run():
    script = ROOT / "launch" / "rigl_tiny_llama.py"
    _, output = run("launch/torchrun.sh", script, "--steps", 12, "--every", 3, NPROC=2)
    static, rigl = re.findall(r"(\w+): ([\d,]+) pruned(?:, ([\d,]+) have grown)?, held-out", output)
    assert static == ("static", "722,534", "") and rigl[:2] == ("RigL", "722,534"), output
    assert int(rigl[2].replace(",", "")) > 10_000  # at steps 3 and 6 of the first three quarters
