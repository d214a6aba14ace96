"""The diffs of docs/extending.md apply to the package, touch few files, and do what they say."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import distprune

ROOT = Path(__file__).parents[2]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
OPTION = """
from torch import nn
from distprune.recipes import Recipe
from distprune.schedule import ScheduledPruner
recipe = Recipe(sparsity=0.5, verify_every=3)
assert recipe.as_values()["verify_every"] == 3
assert ScheduledPruner.from_recipe(nn.Linear(4, 4), recipe)._verify_every == 3
assert "verify_every" not in Recipe(sparsity=0.5).as_values()
"""
SCORE = """
import torch
import distprune as prune
layer = torch.nn.Linear(4, 1)
layer.weight.data = torch.tensor([[0.0, 1.0, -1.0, 1.5]])
prune.global_unstructured([(layer, "weight")], prune.FarFromOne, amount=2)
assert layer.weight_mask.tolist() == [[0, 1, 0, 1]]
"""


def test_the_diffs_apply_and_work(tmp_path):
    shutil.copytree(Path(distprune.__file__).parent, tmp_path / "distprune")
    for diff in DIFFS:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True, cwd=tmp_path)
        assert 1 < diff.count("\n+++ ") + diff.startswith("+++ ") <= 3
    assert len(DIFFS) == 2
    command = [sys.executable, "-c", OPTION + SCORE]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
