"""verify on several ranks: the same findings, in the same order, and every rank raises or none."""

import os
from unittest import mock

import pytest
import torch

from distprune._common.process_groups import world
from distprune.files import planning, pruning
from distprune.files.checkpoints.header import read_header
from distprune.files.checkpoints.mask_files import MASK_FILE, open_masks
from distprune.files.checks import side_by_side
from distprune.files.errors import CheckpointError, FilesError, Interrupted
from distprune.files.recipe import FileRecipe
from distprune.files.reports.report import REPORT_FILE
from distprune.files.verifying import verify
from distprune.testing import run_ranks
from helpers import tiny_checkpoints
from helpers.small_work_units import small_chunks, small_units

WAYS = [
    {"sparsity": 0.5},
    {"sparsity": 0.5, "scope": "layer"},
    {"sparsity": 0.5, "scope": "row"},
    {"sparsity": 0.5, "score": "random"},
]


def weights(num, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        f"layers.{n}.weight": (torch.randn(6, 20, generator=g) * 2).round().bfloat16() + 0.25
        for n in range(num)
    }


@pytest.fixture
def make(tmp_path):
    def make(way, name="target"):
        source = tmp_path / f"source of {name}"
        tensors = weights(9) | {"norm.weight": torch.ones(9)}
        names = list(tensors)
        parts = ({n: tensors[n] for n in names[:4]}, {n: tensors[n] for n in names[4:]})
        tiny_checkpoints.save(source, *parts)
        pruning.prune(planning.plan(source, FileRecipe(**way)), tmp_path / name)
        return source, tmp_path / name

    return make


def found_here(target, source):
    """On every rank: how verify ends."""
    with (
        small_units(num_elements=44, copy_bytes=100),
        pytest.MonkeyPatch.context() as patch,
    ):
        small_chunks(patch, 24)
        try:
            found = verify(target, source)
            return found.problems, found.num_bytes, found.num_pruned
        except FilesError as error:
            return type(error).__name__, error.headline


def damage(source, target):
    """Bytes that differ at the ends of units and between them, in weights, masks and copies."""
    for path in target.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        for tensor in read_header(path).tensors:
            for at in (tensor.start, tensor.start + 88, tensor.stop - 1):
                if at < tensor.stop:
                    raw[at] ^= 0x41
        path.write_bytes(raw)
    masks = open_masks(target)
    raw = bytearray((target / MASK_FILE).read_bytes())
    for name in ("layers.1.weight", "layers.7.weight"):
        raw[masks.starts[name]] ^= 3
    (target / MASK_FILE).write_bytes(raw)
    (target / "more").write_text("x")
    text = (target / "config.json").read_text()
    (target / "config.json").write_text(text.replace("tiny", "tinx"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_any_number_of_ranks_finds_the_same(make, way):
    source, target = make(way)
    healthy = verify(target, source)
    assert healthy.is_good
    size = sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    assert healthy.num_bytes == size
    for world_size in (1, 2, 3):
        for found in run_ranks(found_here, world_size, target, source):
            assert found == (healthy.problems, healthy.num_bytes, healthy.num_pruned)
    damage(source, target)
    damaged = verify(target, source)
    assert len(damaged.problems) > 12
    for world_size in (1, 2, 3):
        for found in run_ranks(found_here, world_size, target, source):
            assert found == (damaged.problems, damaged.num_bytes, damaged.num_pruned)


def different_folders(targets, source):
    return found_here(targets[world().index], source)


def broken_on_one(target, source):
    """One rank cannot read a file in the middle."""
    if world().index == 1:

        def fail(*_):
            raise CheckpointError("a file went away")

        with mock.patch.object(side_by_side, "read_keep", fail):
            return found_here(target, source)
    return found_here(target, source)


def test_every_rank_raises_or_none_does(make, tmp_path):
    source, target = make({"sparsity": 0.5})
    os.symlink(target, tmp_path / "other name")
    targets = [target, tmp_path / "other name"]
    for kind, text in run_ranks(different_folders, 2, targets, source):
        assert kind == "RanksError" and "other name" in text
    for kind, text in run_ranks(broken_on_one, 2, target, source):
        assert (kind, text) == ("CheckpointError", "on rank 1: a file went away")
    (target / REPORT_FILE).write_text("{")
    for kind, text in run_ranks(found_here, 2, target, source):
        assert kind == "CheckpointError" and "report.json is not valid JSON" in text


def test_progress_counts_every_byte_once_and_a_stop_is_obeyed(make):
    source, target = make({"sparsity": 0.5})
    seen = []
    found = verify(target, source, progress=seen.append)
    assert seen[-1].phase == "verify" and seen[-1].num_bytes == seen[-1].total_bytes
    assert seen[-1].num_bytes == found.num_bytes + 9 * 6 * 20 * 2  # ranked again
    before = tiny_checkpoints.tree_digest(target)
    with pytest.raises(Interrupted, match="nothing was changed"):
        verify(target, source, stop=lambda: True)
    assert tiny_checkpoints.tree_digest(target) == before


@pytest.mark.parametrize(
    ("way", "in_memory", "num_reads"),
    [
        (WAYS[0], 50, 2),
        (WAYS[1], 10**9, 1),
        (WAYS[1], 50, 2),
        (WAYS[2], 50, 1),
        (WAYS[3], 50, 1),
    ],
)
def test_the_result_is_read_once_and_the_source_as_prune_reads_it(
    make, monkeypatch, way, in_memory, num_reads
):
    """Large layers, and what is ranked together, are counted before they are compared.

    And blocks of ties that a cut divides are read for the places of these.
    """
    small_chunks(monkeypatch, 24, in_memory)
    source, target = make(way)
    counts = {}
    preadv = os.preadv

    def counting(descriptor, buffers, offset):
        count = preadv(descriptor, buffers, offset)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        counts[path] = counts.get(path, 0) + count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    assert verify(target, source).is_good
    for path in source.glob("*.safetensors"):
        names = [t for t in read_header(path).tensors if t.name.startswith("layers")]
        again = (num_reads - 1) * sum(tensor.nbytes for tensor in names)
        ties = sum(tensor.nbytes for tensor in names) if again else 0
        assert 0 <= counts[str(path)] - path.stat().st_size - again <= ties
        result = target / path.name
        assert counts[str(result)] == result.stat().st_size
    assert counts[str(target / MASK_FILE)] <= (target / MASK_FILE).stat().st_size
