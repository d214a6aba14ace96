"""How many bytes a ranking reads, as multiples of the tensors' bytes; random scores read none."""

import pytest
import torch

from distprune.files import planning, pruning, ranked
from distprune.files.planning import bytes_to_count
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe

RECIPES = {
    "raw": {},
    "rms": {"normalize": "rms"},
    "limits": {"min_sparsity": 0.45, "max_sparsity": 0.55},
    "random": {"score": "random", "seed": 3},
    "erk": {"budget": "erk"},
}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def num_read(monkeypatch):
    """Bytes of tensors that were read, read by read."""
    sizes, read_into = [], ranked.read_into

    def counting(path, parts):
        parts = list(parts)
        if len(parts) == 1:  # samples are many small parts
            sizes.append(len(parts[0][1]))
        read_into(path, parts)

    monkeypatch.setattr(ranked, "read_into", counting)
    return sizes


def weights(dtype):
    g = torch.Generator().manual_seed(0)
    scaled = {s: torch.randn(1000, 600, generator=g) * s for s in (1, 2, 3, 4)}
    return {f"{scale}.weight": weight.to(dtype) for scale, weight in scaled.items()}


@pytest.mark.parametrize(
    ("fields", "of_bf16", "of_fp32"),
    [
        ({}, 9_600_000, 19_200_000),  # 2 times the weights
        (RECIPES["rms"], 19_200_000, 38_400_000),  # 4
        (RECIPES["limits"], 20_400_000, 40_800_000),  # 4.25
        (RECIPES["erk"], 9_600_000, 19_200_000),  # 2
        (RECIPES["random"], 4_800_000, 9_600_000),  # once, to write
        ({"scope": "layer"}, 9_600_000, 19_200_000),  # 2 times, as where all are ranked together
        ({"scope": "row"}, 4_800_000, 9_600_000),
        ({"sparsity": None, "pattern": "2:4"}, 4_800_000, 9_600_000),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_a_pruning_reads_in_all(tmp_path, num_read, fields, of_bf16, of_fp32, dtype):
    """The search and the write; a change of these numbers has to be meant."""
    source = tiny_checkpoints.save(tmp_path / "source", weights(dtype))
    recipe = raw_recipe(**{"sparsity": 0.5, "masks": False, **fields})
    plan = planning.plan(source, recipe)
    pruning.prune(plan, tmp_path / "target")
    assert bytes_to_count(plan) + 2_400_000 * dtype.itemsize <= sum(num_read)
    assert sum(num_read) == (of_bf16 if dtype is BF16 else of_fp32)
