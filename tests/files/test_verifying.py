"""verify: finds every kind of damage, and nothing where there is none."""

import json

import numpy as np
import pytest
import torch

from distprune.files import planning, pruning, verifying
from distprune.files.checkpoints.mask_files import MASK_FILE, open_masks
from distprune.files.checks import side_by_side
from distprune.files.errors import CheckpointError
from distprune.files.formats.header import read_header
from distprune.files.ranking import streaming
from distprune.files.recipe import FileRecipe
from distprune.files.results import rewriting
from helpers import tiny_checkpoints

MODEL = "model.safetensors"
RECIPES = {
    "global": FileRecipe(0.5),
    "layer": FileRecipe(0.5, "layer"),
    "row": FileRecipe(0.5, "row"),
    "pattern": FileRecipe(pattern="2:4"),
    "random": FileRecipe(0.5, score="random"),
}


@pytest.fixture(params=RECIPES)
def pruned(request, tmp_path, monkeypatch):
    """(source, destination) with many ties, in small pieces; whole layers in two reads."""
    for module in (streaming, rewriting, side_by_side):
        monkeypatch.setattr(module, "CHUNK", 100)
        monkeypatch.setattr(module, "MAX_IN_MEMORY", 200)
    g = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": (torch.randn(16, 40, generator=g) * 2).round().bfloat16() + 1e-30,
        "b.weight": (torch.randn(16, 40, generator=g) * 2).round().bfloat16() + 1e-30,
        "norm.weight": torch.ones(40),
    }
    source = tiny_checkpoints.save(tmp_path / "source", tensors)
    pruning.prune(planning.plan(source, RECIPES[request.param]), tmp_path / "target")
    return source, tmp_path / "target"


def flip(path, byte, bits):
    raw = bytearray(path.read_bytes())
    raw[byte] ^= bits
    path.write_bytes(raw)


def entry(folder, name):
    return next(t for t in read_header(folder / MODEL).tensors if t.name == name)


def test_finds_nothing_where_nothing_is_wrong(pruned):
    found = verifying.verify(pruned[1], pruned[0])
    assert found.is_good and found.num_pruned == found.num_elements // 2 == 640
    others = sum((pruned[0] / n).stat().st_size for n in ("config.json", "tokenizer.json"))
    assert found.num_bytes == (pruned[0] / MODEL).stat().st_size + others


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "norm.weight"])
def test_finds_a_flipped_bit(pruned, name):
    flip(pruned[1] / MODEL, entry(pruned[1], name).start + 33, 0x80)
    (problem,) = verifying.verify(*pruned[::-1]).problems
    assert name in problem or (name == "norm.weight" and "belongs to no pruned tensor" in problem)


def test_finds_a_changed_copy_and_a_missing_one(pruned):
    flip(pruned[1] / "config.json", 3, 1)
    (pruned[1] / "tokenizer.json").unlink()
    problems = verifying.verify(*pruned[::-1]).problems
    assert len(problems) == 2
    assert problems[0] == "tokenizer.json is missing." and "config.json: byte 3" in problems[1]


def set_mask(source, folder, index, keep):
    """Change an element of b.weight's mask, and its value with it."""
    masks = open_masks(folder)
    flip(folder / MASK_FILE, masks.starts["b.weight"] + index // 8, 1 << index % 8)
    where = entry(folder, "b.weight").start + 2 * index
    raw = bytearray((folder / MODEL).read_bytes())
    raw[where : where + 2] = (source / MODEL).read_bytes()[where : where + 2] if keep else b"\0\0"
    (folder / MODEL).write_bytes(raw)


def keeps(source, folder):
    masks = open_masks(folder)
    raw = (folder / MASK_FILE).read_bytes()[masks.starts["b.weight"] :][:80]
    return np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").astype(bool)


def test_finds_a_wrong_count(pruned):
    set_mask(*pruned, int(np.flatnonzero(keeps(*pruned))[5]), keep=False)
    assert any(
        "641 elements are pruned in all" in p for p in verifying.verify(*pruned[::-1]).problems
    )


def test_finds_a_wrong_order_even_among_ties(pruned, request):
    """Swap two equal elements of a group: only the order of ties tells."""
    values = tiny_checkpoints.load(pruned[0])["b.weight"].flatten().abs()
    kept = keeps(*pruned)
    recipe = request.node.callspec.params["pruned"]
    group = {"pattern": 4, "row": 40}.get(recipe, 640)
    i, j = next(
        (i, j)
        for i in np.flatnonzero(~kept).tolist()
        for j in range(i + 1, (i // group + 1) * group)
        if kept[j] and (recipe == "random" or values[i] == values[j])
    )
    set_mask(*pruned, i, keep=True)
    set_mask(*pruned, j, keep=False)
    (problem,) = verifying.verify(*pruned[::-1]).problems
    assert "order of scores" in problem


def test_refuses_what_does_not_belong_together(pruned, tmp_path):
    other = tiny_checkpoints.save(tmp_path / "other", {"a.weight": torch.ones(4, 4)})
    with pytest.raises(CheckpointError, match="was not made from"):
        verifying.verify(pruned[1], other)
    with pytest.raises(CheckpointError, match="has no report"):
        verifying.verify(other, pruned[0])
    report = pruned[1] / "distprune" / "report.json"
    report.write_text(json.dumps({"schema": 2}))
    with pytest.raises(CheckpointError, match="no report of distprune"):
        verifying.verify(*pruned[::-1])
