"""Pruned checkpoints equal the oracle's, bit for bit; how many bytes a ranking reads."""

import pytest
import torch

from distprune.files import planning, pruning, ranked, verifying
from distprune.files.errors import CheckpointError, FilesError
from distprune.files.planning import bytes_to_count
from distprune.files.reports import read_report
from distprune.testing import run_ranks
from helpers import file_oracle, tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.tiny_checkpoints import load, tree_digest

RUN = ("distprune/report.json",)


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


def check(tensors, source, target, way):
    """Prune, and compare everything with the oracle."""
    plan = planning.plan(source, raw_recipe(**way))
    report = pruning.prune(plan, target)
    masks = expected(tensors, way)
    file_oracle.check(source, target, masks, load)
    counts = {name: int((~keep).sum()) for name, keep in masks.items()}
    assert report.num_pruned == plan.num_to_prune == sum(counts.values())
    assert {t.name: t.num_pruned for t in report.tensors} == counts
    checked = verifying.verify(target, source)
    assert checked.problems == () and checked.num_pruned == report.num_pruned


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
    for which, way in every(3, enumerate(WAYS), list(KINDS).index(kind)):
        check(tensors, source, tmp_path / f"target{which}", way)
    assert tree_digest(source) == before


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_do_not_fit_into_memory(tmp_path, monkeypatch, kind, small_pieces):
    monkeypatch.setattr(ranked, "_MOST_COLLECTED", 7)
    source = tiny_checkpoints.save(tmp_path / "source", KINDS[kind])
    for which in (0, 1, 5):
        check(KINDS[kind], source, tmp_path / f"target{which}", WAYS[which])


def prune_here(source, target, way):
    """On every rank of a group."""
    plan = planning.plan(source, raw_recipe(**way))
    return pruning.prune(plan, target).num_pruned


@pytest.mark.parametrize("scope", ["global", "layer", "row"])
def test_nan_is_refused_by_name(tmp_path, scope):
    tensors = {name: tensor.clone() for name, tensor in KINDS["bf16"].items()}
    nans = tensors[SELECTED[1]]
    nans.view(torch.int16).view(-1)[[3, 40, 100]] = torch.tensor([0x7FC0, -1, 0x7F81]).short()
    source = tiny_checkpoints.save(tmp_path / "source", tensors)
    for world_size in (1, 2):
        text = run_ranks(refused, world_size, source, tmp_path / "a", {"scope": scope})
        assert all(kind == "NaNError" and SELECTED[1] in words for kind, words in text)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def refused(source, target, way):
    try:
        prune_here(source, target, {"sparsity": 0.5} | way)
    except FilesError as error:
        return type(error).__name__, str(error)


def test_everything_else_is_copied(tmp_path):
    source = tiny_checkpoints.save(tmp_path / "source", KINDS["bf16"])
    (source / "extra").mkdir()
    (source / "extra" / "caf\udce9.txt").write_text("not UTF-8")
    (source / "tokenizer.json").rename(source / "extra" / "blob")
    (source / "tokenizer.json").symlink_to(source / "extra" / "blob")
    (source / "link").symlink_to(source / "extra", target_is_directory=True)
    target = tmp_path / "target"
    report = pruning.prune(planning.plan(source, raw_recipe(0.5)), target)
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert (target / "tokenizer.json").read_bytes() == (target / "extra" / "blob").read_bytes()
    for folder in ("extra", "link"):
        assert (target / folder / "caf\udce9.txt").read_text() == "not UTF-8"
    assert "sparsity: 0.5\n" in (target / "distprune" / "recipe.yaml").read_text()
    assert read_report(target) == report and isinstance(report.tensors[0].shape, tuple)
    names = sorted(path.name for path in (target / "distprune").iterdir())
    assert names == ["masks.safetensors", "recipe.yaml", "report.json"]


def test_weights_that_change_while_they_are_counted_are_an_error(tmp_path, monkeypatch):
    source = tiny_checkpoints.save(tmp_path / "source", {"a.weight": torch.randn(20, 40) + 9})
    monkeypatch.setattr(ranked, "_MOST_COLLECTED", 0)  # the second read goes on from the first
    num_reads, read_into = [], ranked.read_into

    def changing(path, parts):
        parts = list(parts)
        read_into(path, parts)
        num_reads.append(len(parts) == 1)  # samples are many small parts
        for _, buffer in parts if sum(num_reads) > 1 else ():
            buffer[:] = bytes(len(buffer))

    monkeypatch.setattr(ranked, "read_into", changing)
    with pytest.raises(CheckpointError, match="The weights changed while they were read"):
        pruning.prune(planning.plan(source, raw_recipe(0.5)), tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


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


def scaled_weights(dtype):
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
    source = tiny_checkpoints.save(tmp_path / "source", scaled_weights(dtype))
    recipe = raw_recipe(**{"sparsity": 0.5, "masks": False, **fields})
    plan = planning.plan(source, recipe)
    pruning.prune(plan, tmp_path / "target")
    assert bytes_to_count(plan) + 2_400_000 * dtype.itemsize <= sum(num_read)
    assert sum(num_read) == (of_bf16 if dtype is BF16 else of_fp32)
