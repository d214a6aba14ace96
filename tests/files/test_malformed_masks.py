"""Masks whose metadata were changed are refused with one error, and no other."""

import json

import pytest
import torch

from distprune.files.checkpoints.mask_files import MASK_FILE, open_masks
from distprune.files.errors import CheckpointError
from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.recipe import FileRecipe
from helpers.tiny_checkpoints import encode, save

BAD = [None, -1, 0, True, "x", "16", [], {}, [[]], [-4, -4], [4.0, 4], ["4", 4], [[4], 4], 2**70]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masks")
    source = save(folder / "source", {"a.weight": torch.randn(4, 4)})
    prune(plan(source, FileRecipe(0.5)), folder / "pruned")
    return folder / "pruned"


@pytest.fixture
def change(pruned):
    """change(key, value): write the masks with other metadata."""
    path = pruned / MASK_FILE
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def write(key, text):
        header["__metadata__"][key] = text
        path.write_bytes(encode(header, data))

    yield write
    path.write_bytes(raw)


@pytest.mark.parametrize("bad", BAD)
def test_shapes(pruned, change, bad):
    for value in (bad, {"a.weight": bad}, {"b.weight": [4, 4]}):
        change("shapes", json.dumps(value))
        with pytest.raises(CheckpointError, match="shapes"):
            open_masks(pruned)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": NaN}', "\udcff"])
def test_metadata_that_are_no_json(pruned, change, text):
    for key in ("shapes", "header_crc32"):
        change(key, text)
        with pytest.raises(CheckpointError):
            open_masks(pruned)


@pytest.mark.parametrize("bad", [None, 1, [], "x", {"model.safetensors": "1"}, {"a": None}])
def test_checksums(pruned, change, bad):
    change("header_crc32", json.dumps(bad))
    with pytest.raises(CheckpointError, match="header_crc32"):
        open_masks(pruned)
