"""The notebook of examples/ has no outputs, and its cells run from the first to the last."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "language_model_in_ten_minutes.ipynb"
CELLS = [
    cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]  # fmt: skip


def test_cells_parse_and_have_no_outputs():
    for cell in CELLS:
        ast.parse("".join(cell["source"]))
        assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cells_run(tmp_path):
    """Its assertions compare perplexities, and count the zeros."""
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in CELLS), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WORK": str(tmp_path / "work")}
    done = subprocess.run(
        [sys.executable, program], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
