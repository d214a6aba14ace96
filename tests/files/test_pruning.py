"""Pruned checkpoints equal the oracle's, bit for bit, for every scope, score, dtype and layout."""

import pytest
import torch

import file_oracle
import tiny_checkpoints
from distprune.files import planning, pruning, rewriting, streaming, units
from distprune.files.recipe import FileRecipe
from tiny_checkpoints import load, tree_digest

RUN = ("distprune/run.json",)


def weights(seed=0):
    """Tensors of all kinds; bf16 with many ties, signed zeros, infinities and denormals."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    tensors = {
        "model.embed_tokens.weight": normal(11, 8).bfloat16(),
        "model.layers.10.mlp.weight": normal(13, 8).bfloat16(),
        "model.layers.2.mlp.weight": (normal(9, 24) * 4).round().bfloat16() / 4,
        "model.layers.2.norm.weight": normal(8).bfloat16(),
        "model.layers.2.attn.weight": normal(7, 16).bfloat16(),
        "lm_head.weight": normal(11, 8).bfloat16(),
    }
    flat = tensors["model.layers.10.mlp.weight"].view(-1)
    flat[:6] = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), 1e-40, -1e-40])
    return tensors


def with_dtypes(tensors, *dtypes):
    names = [name for name in tensors if "layers" in name]
    converted = {n: tensors[n].to(dtypes[i % len(dtypes)]) for i, n in enumerate(names)}
    return tensors | converted


SELECTED = [f"model.layers.{n}.weight" for n in ("10.mlp", "2.mlp", "2.attn")]
KINDS = {
    "bf16": weights(),
    "fp16": with_dtypes(weights(), torch.float16),
    "fp32": with_dtypes(weights(), torch.float32),
    "fp64": with_dtypes(weights(), torch.float64),
    "mixed": with_dtypes(weights(), torch.bfloat16, torch.float32, torch.float16, torch.float16),
    "wide mix": with_dtypes(weights(), torch.float64, torch.bfloat16, torch.float16),
}
WAYS = [
    {"sparsity": 0.5},
    {"sparsity": 0.37, "scope": "layer"},
    {"sparsity": 0.3, "scope": "row"},
    {"pattern": "2:4"},
    {"pattern": "3:8"},
    {"sparsity": 0.61, "score": "random", "seed": 5},
    {"sparsity": 0.5, "scope": "row", "score": "random", "seed": 5},
]


def expected(tensors, way, names=SELECTED):
    return file_oracle.masks(tensors, names, **{k: v for k, v in way.items() if k != "score"})


@pytest.fixture
def small_pieces(monkeypatch):
    """Many units, spans and chunks, as large tensors have them."""
    monkeypatch.setattr(units, "_MIN_ELEMENTS", 40)
    monkeypatch.setattr(units, "_COPY_BYTES", 100)
    monkeypatch.setattr(units.prune_units, "__defaults__", (128, 40))
    for module in (streaming, rewriting):
        monkeypatch.setattr(module, "CHUNK", 24)
    monkeypatch.setattr(rewriting, "_MAX_IN_MEMORY", 20)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_oracle(tmp_path, kind, small_pieces):
    tensors = KINDS[kind]
    names = list(tensors)
    source = tiny_checkpoints.save(
        tmp_path / "source",
        {n: tensors[n] for n in names[:3]},
        {n: tensors[n] for n in names[3:]},
        padding=1 if kind == "fp16" else 8,
    )
    before = tree_digest(source)
    for which, way in enumerate(WAYS):
        target = tmp_path / f"target{which}"
        plan = planning.plan(source, FileRecipe(**way))
        report = pruning.prune(plan, target)
        masks = expected(tensors, way)
        file_oracle.check(source, target, masks, load)
        num_pruned = sum(int((~keep).sum()) for keep in masks.values())
        assert report.num_pruned == plan.num_to_prune == num_pruned
        assert {t.name: t.num_pruned for t in report.tensors} == {
            name: int((~keep).sum()) for name, keep in masks.items()
        }
    assert tree_digest(source) == before
