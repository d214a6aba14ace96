"""The names and the product of the pruned form are spelled in one module only."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

import distprune
from distprune._common import pruned_form
from distprune.testing import clear_dtensor_caches

PACKAGE = Path(distprune.__file__).parent
HOME = PACKAGE / "_common" / "pruned_form.py"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != HOME]
# Adapters import DTensor anyway; torch.compile traces what they run inside forward.
MAY_USE_ISINSTANCE = ("torch_private",)
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
    """Use orig_key, mask_key and their inverses; masked_product, write_product and is_dtensor."""
    wrong = []
    for path in FILES:
        source = path.read_text()
        spelled = [text for text in suffixes_in(source) if (path.name, text) not in NOT_A_SUFFIX]
        spelled += re.findall(r"\bmask\.to\([^()]*dtype\) \* |\* mask\.to\([^()]*dtype\)", source)
        if path.parent.name not in MAY_USE_ISINSTANCE:
            spelled += dtensor_checks(source)
        wrong += [(str(path.relative_to(PACKAGE)), text) for text in spelled]
    assert not wrong


def test_keys_and_their_inverses():
    assert pruned_form.orig_key("a.weight") == "a.weight_orig"
    assert pruned_form.mask_key("a.weight") == "a.weight_mask"
    assert pruned_form.name_of_orig("a.weight_orig") == "a.weight"
    assert pruned_form.name_of_orig("a.weight") is None
    assert pruned_form.name_of_mask("a.weight_mask") == "a.weight"
    assert pruned_form.name_of_mask("a.weight_orig") is None
    assert pruned_form.name_without_orig("weight_orig") == "weight"
    assert pruned_form.name_without_orig("weight") == "weight"


def test_one_key_of_a_pair_is_no_pruned_parameter():
    keys = {"a_orig", "a_mask", "b_mask", "c_orig", "c"}
    assert [k for k in sorted(keys) if pruned_form.name_of_pruned_mask(k, keys)] == ["a_mask"]
    assert [k for k in sorted(keys) if pruned_form.name_of_pruned_orig(k, keys)] == ["a_orig"]


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_the_product_has_the_dtype_of_the_parameter(mask_dtype):
    original = torch.tensor([1.5, -2.0, float("inf"), -0.0], dtype=torch.bfloat16)
    mask = torch.tensor([1, 0, 0, 1]).to(mask_dtype)
    product = pruned_form.masked_product(original, mask)
    assert product.dtype == torch.bfloat16
    assert product.tolist()[0] == 1.5 and product[2].isnan()
    assert torch.signbit(product).tolist()[1::2] == [True, True]


def test_a_plain_tensor_is_no_dtensor_and_is_its_own_local_part():
    tensor = torch.zeros(2)
    assert not pruned_form.is_dtensor(tensor) and not pruned_form.is_dtensor(None)
    assert pruned_form.local_tensor(tensor) is tensor


def test_a_dtensor_is_recognised(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.arange(3.0), mesh, [Replicate()])
        for value in (tensor, torch.nn.Parameter(tensor)):
            assert isinstance(value, DTensor) and pruned_form.is_dtensor(value)
            assert pruned_form.local_tensor(value).tolist() == [0.0, 1.0, 2.0]
    finally:
        dist.destroy_process_group()
        clear_dtensor_caches()


@pytest.mark.slow
def test_the_module_does_not_import_torch():
    code = "import sys, distprune._common.pruned_form; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
