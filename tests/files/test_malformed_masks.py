"""Masks whose metadata were changed are refused with one error, and no other."""

import json

import pytest
import torch

from distprune.files.errors import CheckpointError
from distprune.files.mask_files import MASK_FILE, open_masks
from distprune.files.planning import plan
from distprune.files.pruning import prune
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import encode, save

BAD = [None, -1, "x", [[]], [-4, -4, 3], ["4", 4], [[4], 4], {"a": "x"}, 2**70]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    source = save(folder / "source", {"a.weight": torch.randn(4, 4)})
    prune(plan(source, raw_recipe(0.5)), folder / "pruned")
    return folder / "pruned"


@pytest.mark.parametrize("bad", BAD)
def test_bad_metadata(pruned, tmp_path, bad):
    raw = (pruned / MASK_FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    path = tmp_path / MASK_FILE
    path.parent.mkdir()
    texts = [json.dumps({"a.weight": bad}), json.dumps({"b.weight": [4, 4]}), "{", "[" * 99999]
    for text in [json.dumps(bad), *texts]:
        header["__metadata__"]["shapes"] = text
        path.write_bytes(encode(header, raw[8 + length :]))
        with pytest.raises(CheckpointError, match="malformed"):
            open_masks(tmp_path)
