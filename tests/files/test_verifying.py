"""verify: finds every kind of damage, and nothing where there is none."""

import json

import numpy as np
import pytest
import torch

from distprune.files import planning, pruning, verifying
from distprune.files.checkpoints.header import read_header
from distprune.files.checkpoints.mask_files import MASK_FILE, open_masks
from distprune.files.errors import CheckpointError
from distprune.files.recipe import FileRecipe
from helpers import tiny_checkpoints
from helpers.small_work_units import small_chunks, small_units

MODEL = "model.safetensors"
TWO = "2 elements are pruned or kept against the order of scores; the first is number"
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
    small_chunks(monkeypatch, 100, 200)
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


def set_mask(source, folder, index, keep, name="b.weight"):
    """Change an element of a mask, and its value with it."""
    assert keeps(folder, name)[index] != keep
    flip(folder / MASK_FILE, open_masks(folder).starts[name] + index // 8, 1 << index % 8)
    tensor = entry(folder, name)
    size = tensor.nbytes // tensor.numel
    where = slice(tensor.start + size * index, tensor.start + size * (index + 1))
    raw = bytearray((folder / MODEL).read_bytes())
    raw[where] = (source / MODEL).read_bytes()[where] if keep else bytes(size)
    (folder / MODEL).write_bytes(raw)


def keeps(folder, name="b.weight"):
    raw = (folder / MASK_FILE).read_bytes()[open_masks(folder).starts[name] :]
    numel = entry(folder, name).numel
    return np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")[:numel].astype(bool)


def exchange(source, folder, back, out):
    """Keep the first pruned element of one tensor, and prune the last kept one of another."""
    for name, is_kept, which in ((back, False, 0), (out, True, -1)):
        index = int(np.flatnonzero(keeps(folder, name) == is_kept)[which])
        set_mask(source, folder, index, not is_kept, name)


def test_finds_a_wrong_count(pruned):
    set_mask(*pruned, int(np.flatnonzero(keeps(pruned[1]))[5]), keep=False)
    assert any(
        "641 elements are pruned in all" in p for p in verifying.verify(*pruned[::-1]).problems
    )


def test_finds_a_wrong_order_even_among_ties(pruned, request):
    """Swap two equal elements of a group: only the order of ties tells."""
    values = tiny_checkpoints.load(pruned[0])["b.weight"].flatten().abs()
    kept = keeps(pruned[1])
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
    assert problem == f"b.weight: {TWO} {i}."


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("apart", [1, 24, 25, 90, 200])
def test_finds_two_exchanged_ties(tmp_path, monkeypatch, scope, apart):
    """All elements are equal: the last pruned one stays, and a later one goes in its place."""
    small_chunks(monkeypatch, 24, 12)
    with small_units(num_elements=64):
        tensors = {f"{n}.weight": torch.ones(20, 20).bfloat16() for n in "ab"}
        source = tiny_checkpoints.save(tmp_path / "source", tensors)
        folder = tmp_path / "target"
        pruning.prune(planning.plan(source, FileRecipe(0.25, scope)), folder)
        last = {"global": 199, "layer": 99}[scope]
        for index, keep in ((last, True), (last + apart, False)):
            set_mask(source, folder, index, keep, "a.weight")
        (problem,) = verifying.verify(folder, source).problems
    assert problem == f"a.weight: {TWO} {last}."


@pytest.mark.parametrize("change", ["within", "between", "limit"])
def test_finds_an_exchange_in_a_group(tmp_path, change):
    """As many elements are pruned as before, but others."""
    g = torch.Generator().manual_seed(0)
    names = ["a.0.weight", "a.1.weight", "b.weight"]
    tensors = {n: (torch.randn(4, 40, generator=g) * 4).round() / 4 + 9 for n in names}
    tensors["a.1.weight"] += 50 if change == "limit" else 1
    source = tiny_checkpoints.save(tmp_path / "source", tensors)
    groups = (
        FileRecipe(0.5, include=("a*",), max_sparsity=0.8 if change == "limit" else 1.0),
        FileRecipe(0.25, include=("b*",)),
    )
    target = tmp_path / "target"
    pruning.prune(planning.plan(source, FileRecipe(groups=groups)), target)
    assert verifying.verify(target, source).is_good
    pair = {
        "within": ("a.0.weight", "a.0.weight"),
        "between": ("a.0.weight", "b.weight"),
        "limit": ("a.1.weight", "a.0.weight"),  # a.0 is at its ceiling
    }[change]
    exchange(source, target, *pair)
    problems = verifying.verify(target, source).problems
    for name in pair:
        count = pair.count(name)
        text = f"{name}: {count} elements are pruned or kept against the order of scores;"
        assert any(problem.startswith(text) for problem in problems), problems
    assert not any("neither kept" in problem for problem in problems)


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
