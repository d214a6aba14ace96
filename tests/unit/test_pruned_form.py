"""The names and the product of the pruned form are spelled in one module only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distprune

PACKAGE = Path(distprune.__file__).parent
HOME = PACKAGE / "base" / "pruned_form.py"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != HOME]
# Adapters import DTensor anyway; torch.compile traces what they run inside forward.
MAY_USE_ISINSTANCE = ("wrappers",)
# An attribute of CustomFromMask in its pickled state.
NOT_A_SUFFIX = {("builtin.py", "_mask")}


def suffixes_in(source: str) -> list[str]:
    """String literals, and the texts in f-strings, that begin with _orig or _mask."""
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"\.?_(orig|mask)\b", node.value)
    ]


def dtensor_checks(source: str) -> list[str]:
    """Expressions that recognise a DTensor by its attributes or by its class."""
    return re.findall(
        r'hasattr\([^()]*, "(?:placements|device_mesh|to_local|_local_tensor)"\)'
        r"|isinstance\([^()]*, \(?DTensor\b",
        source,
    )


def test_the_patterns_see_what_they_look_for():
    source = 'a = name + "_orig"; b = f"{name}_mask"; c = f"the buffer {name}_mask, is gone"'
    assert sorted(suffixes_in(source)) == ["_mask", "_mask, is gone", "_orig"]
    assert not suffixes_in('a = "custom_from_mask"; b = f"_distprune_{name}_shard_mask"')
    assert len(dtensor_checks('hasattr(x, "placements") or isinstance(x, DTensor)')) == 2


def test_no_other_module_spells_the_pruned_form():
    """Use orig_key, mask_key and their inverses; masked_product and is_dtensor."""
    wrong = []
    for path in FILES:
        source = path.read_text()
        spelled = [text for text in suffixes_in(source) if (path.name, text) not in NOT_A_SUFFIX]
        spelled += re.findall(r"\bmask\.to\([^()]*dtype\) \* |\* mask\.to\([^()]*dtype\)", source)
        if path.parent.name not in MAY_USE_ISINSTANCE:
            spelled += dtensor_checks(source)
        wrong += [(str(path.relative_to(PACKAGE)), text) for text in spelled]
    assert not wrong


@pytest.mark.slow
def test_the_module_does_not_import_torch():
    code = "import sys, distprune.base.pruned_form; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
