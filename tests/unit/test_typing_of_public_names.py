"""What mypy --strict says of programs that use the public names: right ones pass, wrong ones fail.

A line of a program that must be an error ends in ``# E:`` and a part of the error's text. Every
other line must have none.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distprune

ROOT = Path(distprune.__file__).parents[1]
HEADER = """\
from typing import Any

import torch
from torch import Tensor, nn

import distprune as prune

model: nn.Module = nn.Linear(2, 2)
pairs = prune.select(model)
"""
PROGRAMS = {
    "select": """\
for module, name in prune.select(model, exclude="head", types=nn.Linear):
    module.eval()
    name.upper()
    name.nonsense()  # E: "str" has no attribute "nonsense"
fqn: str = pairs[0].fqn
prune.select(model, excluded="head")  # E: Unexpected keyword argument "excluded"
prune.select(3)  # E: has incompatible type "int"; expected Module
""",
    "global_unstructured": """\
report = prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.5)
sparsity: float = report.sparsity
report.nonsense  # E: "PruningReport" has no attribute "nonsense"
plain = [(model, "weight")]
scores = {(model, "weight"): torch.ones(2, 2)}
prune.global_unstructured(plain, prune.RandomUnstructured, scores, amount=3, min_sparsity=0.1)
prune.global_unstructured(pairs, prune.L1Unstructured, amount="a")  # E: has incompatible type "str"
prune.global_unstructured(pairs, nn.Linear, amount=0.5)  # E: has incompatible type "type[Linear]"
prune.global_unstructured([model], prune.L1Unstructured, amount=0.5)  # E: List item 0 has
""",
    "methods": """\
class Threshold(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def __init__(self, limit: float, *, factor: float = 1.0) -> None:
        self.limit = limit * factor

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        return default_mask * (t.abs() >= self.limit)

prune.global_unstructured(pairs, Threshold, limit=0.1)
prune.global_unstructured(pairs, Threshold, limit=0.1, factor=2.0, group=None)
prune.global_unstructured(pairs, prune.Identity, pipeline_parallel=True)

def prune_by(method: type[prune.BasePruningMethod], arguments: dict[str, Any]) -> None:
    prune.global_unstructured(pairs, method, amount=3, max_sparsity={"weight": 0.5})
    prune.global_unstructured(pairs, method, **arguments)
""",
}
ERROR = re.compile(r"^(\w+)\.py:(\d+): error: (.*)$", re.MULTILINE)


def errors_of_mypy(folder):
    """What mypy says of all programs: {(program, line): texts}."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed; it is in the extra 'lint'")
    for name, program in PROGRAMS.items():
        (folder / f"program_{name}.py").write_text(HEADER + program)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    command += ["--follow-imports=silent", f"--cache-dir={ROOT / '.mypy_cache' / 'programs'}"]
    done = subprocess.run(
        [*command, *sorted(path.name for path in folder.glob("*.py"))],
        cwd=folder,
        env={"PATH": "", "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    texts: dict[tuple[str, int], str] = {}
    for file, line, text in ERROR.findall(done.stdout):
        key = file.removeprefix("program_"), int(line)
        texts[key] = texts.get(key, "") + text
    return texts


# One test: mypy reads the package once, whichever workers run the tests.
@pytest.mark.thorough
@pytest.mark.slow
def test_a_strict_checker_finds_the_mistakes_and_nothing_else(tmp_path):
    errors = errors_of_mypy(tmp_path)
    wrong = []
    for name, program in PROGRAMS.items():
        for number, line in enumerate((HEADER + program).splitlines(), start=1):
            code, _, expected = line.partition("  # E: ")
            text = errors.pop((name, number), None)
            if (text is not None) != bool(expected) or (text and expected not in text):
                wrong.append(f"{name}, {number}: {code}\n    expected {expected!r}, found {text!r}")
    assert not wrong, "\n".join(wrong)
    assert not errors
