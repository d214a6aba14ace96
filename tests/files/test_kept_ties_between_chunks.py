"""An element that is pruned after a kept one of the same score, however far apart they lie."""

import numpy as np
import pytest
import torch

from distprune.files import planning, pruning, verifying
from distprune.files.checkpoints.mask_files import MASK_FILE, open_masks
from distprune.files.checks import side_by_side
from distprune.files.checks.boundary import Boundary
from distprune.files.formats.header import read_header
from distprune.files.ranking import streaming
from distprune.files.recipe import FileRecipe
from distprune.files.results import rewriting
from helpers import tiny_checkpoints
from helpers.small_work_units import small_units


def expected(keys, keep):
    """By sorting everything: whether it is in order, the largest pruned key, and its ties."""
    order = np.lexsort([np.arange(len(keys)), keys])
    is_ordered = bool((np.diff(keep[order].astype(int)) >= 0).all())
    if keep.all():
        return is_ordered, None, 0, 0
    top = keys[~keep].max()
    return is_ordered, int(top), int((keys == top).sum()), int(((keys == top) & ~keep).sum())


def found(boundary):
    last, first = boundary.last_pruned, boundary.first_kept
    if last is None:
        return boundary.is_ordered, None, 0, 0
    num_kept = first.num_ties if first is not None and first.key == last.key else 0
    return boundary.is_ordered, last.key, last.num_ties + num_kept, last.num_ties


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_any_pieces_in_any_order_tell_what_sorting_tells(dtype):
    generator = np.random.default_rng(0)
    num_ordered = 0
    for _ in range(2000):
        numel = int(generator.integers(1, 13))
        keys = generator.integers(0, 4, numel).astype(dtype)
        keep = generator.random(numel) < generator.choice([0, 0.2, 0.5, 0.9, 1])
        if generator.random() < 0.6:  # one that was cut in order, or nearly
            keep = np.ones(numel, bool)
            order = np.lexsort([np.arange(numel), keys])
            keep[order[: generator.integers(0, numel + 1)]] = False
            if generator.random() < 0.5:
                one, two = generator.integers(0, numel, 2)
                keep[[one, two]] = keep[[two, one]]
        whole = Boundary()
        whole.add(keys, keep, 100)
        cuts = np.sort(generator.integers(0, numel + 1, 3))
        pieces = list(zip([0, *cuts], [*cuts, numel], strict=True))
        generator.shuffle(pieces)
        in_pieces, merged = Boundary(), Boundary()
        for first, last in pieces:
            in_pieces.add(keys[first:last], keep[first:last], 100 + first)
            other = Boundary()
            other.add(keys[first:last], keep[first:last], 100 + first)
            merged.merge(Boundary.from_state(other.state()))
        wanted = expected(keys, keep)
        num_ordered += wanted[0]
        for boundary in (whole, in_pieces, merged):
            assert found(boundary) == wanted if wanted[0] else not boundary.is_ordered
            assert boundary.num_pruned == int((~keep).sum())
    assert 500 < num_ordered < 1900


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("apart", [1, 24, 25, 90, 200])
def test_verify_finds_two_exchanged_ties(tmp_path, monkeypatch, scope, apart):
    """All elements are equal: the last pruned one stays, and a later one goes in its place."""
    for module in (streaming, rewriting, side_by_side):
        monkeypatch.setattr(module, "CHUNK", 24)
        monkeypatch.setattr(module, "MAX_IN_MEMORY", 12)
    with small_units(num_elements=64):
        tensors = {f"{n}.weight": torch.ones(20, 20).bfloat16() for n in "ab"}
        source = tiny_checkpoints.save(tmp_path / "source", tensors)
        folder = tmp_path / "target"
        pruning.prune(planning.plan(source, FileRecipe(0.25, scope)), folder)
        assert verifying.verify(folder, source).is_good
        last = {"global": 199, "layer": 99}[scope]
        for index, keep in ((last, True), (last + apart, False)):
            put(source, folder, index, keep=keep)
        (problem,) = verifying.verify(folder, source).problems
    assert "comes after a kept one in the order of scores" in problem


def put(source, folder, index, *, keep):
    """Change an element of a.weight and its mask."""
    masks = (folder / MASK_FILE).read_bytes()
    raw = bytearray(masks)
    byte = open_masks(folder).starts["a.weight"] + index // 8
    assert bool(raw[byte] >> index % 8 & 1) != keep
    raw[byte] ^= 1 << index % 8
    (folder / MASK_FILE).write_bytes(raw)
    path = folder / "model.safetensors"
    entry = next(t for t in read_header(path).tensors if t.name == "a.weight")
    raw = bytearray(path.read_bytes())
    where = slice(entry.start + 2 * index, entry.start + 2 * index + 2)
    raw[where] = (source / "model.safetensors").read_bytes()[where] if keep else b"\0\0"
    path.write_bytes(raw)
