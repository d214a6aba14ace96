"""Pruned checkpoints equal the oracle's, bit for bit; how many bytes a ranking reads."""

import pytest
import torch

import distprune
from distprune.files import planning, pruning, ranked, verifying
from distprune.files import reports as model_card
from distprune.files.checkpoint import open_checkpoint
from distprune.files.errors import CheckpointError, FilesError, SelectionError
from distprune.files.planning import bytes_to_count
from distprune.files.reports import read_report
from distprune.files.selecting import Layouts
from distprune.files.verifying import inspect
from distprune.ranking import in_blocks
from distprune.testing import run_ranks
from helpers import file_oracle
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.tiny_checkpoints import load, save, save_in_files, tree_digest

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
    tensors, padding = KINDS[kind], 1 if kind == "fp16" else 8
    source = save_in_files(tmp_path / "source", tensors, 3, padding=padding)
    before = tree_digest(source)
    for which, way in every(3, enumerate(WAYS), list(KINDS).index(kind)):
        check(tensors, source, tmp_path / f"target{which}", way)
    assert tree_digest(source) == before


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_do_not_fit_into_memory(tmp_path, monkeypatch, kind, small_pieces):
    monkeypatch.setattr(ranked, "_MOST_COLLECTED", 7)
    source = save(tmp_path / "source", KINDS[kind])
    for which in (0, 1, 5):
        check(KINDS[kind], source, tmp_path / f"target{which}", WAYS[which])


def test_magnitudes_that_are_equal_when_they_are_divided(tmp_path, small_pieces):
    """Of one tensor the rms is so large that its small scores share few denormal numbers."""
    values = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    tensors = {"a.weight": (values * 1e-15).bfloat16(), "b.weight": values.bfloat16()}
    tensors["a.weight"][0, :4] = 2.0**98
    source = save(tmp_path / "source", tensors)
    for which, sparsity in enumerate((0.05, 0.1, 0.25, 0.4, 0.7)):
        way = {"sparsity": sparsity, "normalize": "rms"}
        pruning.prune(planning.plan(source, raw_recipe(**way)), tmp_path / f"{which}")
        masks = expected(tensors, way, list(tensors))
        file_oracle.check(source, tmp_path / f"{which}", masks, load)


def prune_here(source, target, way):
    """On every rank of a group."""
    plan = planning.plan(source, raw_recipe(**way))
    return pruning.prune(plan, target).num_pruned


@pytest.mark.parametrize("scope", ["global", "layer", "row"])
def test_nan_is_refused_by_name(tmp_path, scope):
    tensors = {name: tensor.clone() for name, tensor in KINDS["bf16"].items()}
    nans = tensors[SELECTED[1]]
    nans.view(torch.int16).view(-1)[[3, 40, 100]] = torch.tensor([0x7FC0, -1, 0x7F81]).short()
    source = save(tmp_path / "source", tensors)
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
    source = save(tmp_path / "source", KINDS["bf16"])
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
    source = save(tmp_path / "source", {"a.weight": torch.randn(20, 40) + 9})
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
        # 2 times the weights; of 16 bits, and a quarter, the tensor whose ties are cut
        ({}, 10_801_024, 19_200_000),
        (RECIPES["rms"], 10_801_024, 38_400_000),  # the same; 4
        (RECIPES["limits"], 18_007_168, 40_800_000),  # 3.75, ties for each bound; 4.25
        (RECIPES["erk"], 14_404_096, 19_200_000),  # 3, ties in each tensor; 2
        (RECIPES["random"], 4_800_000, 9_600_000),  # once, to write
        ({"scope": "layer"}, 14_404_096, 19_200_000),  # 3; 2
        ({"scope": "row"}, 4_800_000, 9_600_000),
        ({"sparsity": None, "pattern": "2:4"}, 4_800_000, 9_600_000),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_a_pruning_reads_in_all(tmp_path, num_read, fields, of_bf16, of_fp32, dtype):
    """The search and the write; a change of these numbers has to be meant."""
    source = save(tmp_path / "source", scaled_weights(dtype))
    recipe = raw_recipe(**{"sparsity": 0.5, **fields})
    plan = planning.plan(source, recipe)
    pruning.prune(plan, tmp_path / "target")
    assert bytes_to_count(plan) + 2_400_000 * dtype.itemsize <= sum(num_read)
    assert sum(num_read) == (of_bf16 if dtype is BF16 else of_fp32)


# N:M and rows go along the inputs where weights are stored [in, out]; inspect and verify agree.


WAYS_OF_INPUTS = [
    {"pattern": "2:4"},
    {"pattern": "3:8"},
    {"sparsity": 0.5, "scope": "row"},
    {"sparsity": 0.3, "scope": "row"},
    {"sparsity": 1.0, "scope": "row"},
    {"sparsity": 0.0, "scope": "row"},
    {"sparsity": 0.4, "scope": "row", "score": "random", "seed": 3},
    {"pattern": "1:4", "score": "random", "seed": 3},
]


def ties(*shape, seed=0, dtype=torch.bfloat16):
    """Few different magnitudes, zeros of both signs among them."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * 2).round().to(dtype) / 2


GPT2 = {
    "h.0.attn.c_attn.weight": ties(8, 24),
    "h.0.attn.c_attn.bias": ties(24),
    "h.0.attn.c_proj.weight": ties(8, 8, seed=1, dtype=torch.float32),
    "h.0.crossattention.q_attn.weight": ties(16, 9, seed=2, dtype=torch.float16),
    "h.0.mlp.c_fc.weight": ties(24, 32, seed=3),
}
EXPERTS = {
    "model.layers.0.mlp.experts.gate_up_proj": ties(3, 8, 48),
    "model.layers.0.mlp.experts.down_proj": ties(3, 24, 8, seed=1),
    "model.layers.0.self_attn.q_proj.weight": ties(8, 8, seed=2),
}
CASES = {
    "gpt2": (GPT2, {n for n in GPT2 if n.endswith("weight")}, {"decoder": {"model_type": "gpt2"}}),
    "gpt_oss": (EXPERTS, set(list(EXPERTS)[:2]), {"model_type": "gpt_oss"}),
    "a family that is not known": (EXPERTS, set(list(EXPERTS)[:2]), {"model_type": "new"}),
    "straight": (
        {n: t.transpose(-1, -2).contiguous() for n, t in EXPERTS.items()},
        set(),
        {"model_type": "mixtral"},
    ),
}  # fmt: skip


def straight(tensor):
    """[..., in, out] as [outputs, in]."""
    return tensor.transpose(-1, -2).flatten(0, -2)


def expected_along(tensors, turned, way):
    """Of the oracle, on matrices that are [outputs, in], turned back."""
    selected = [name for name in tensors if not name.endswith("bias")]
    scores = file_oracle._scores(tensors, file_oracle.sorted_names(selected), way.get("seed"))
    flat = {n: straight(s) if n in turned else s.flatten(0, -2) for n, s in scores.items()}
    ways = {key: value for key, value in way.items() if key not in ("score", "seed")}
    masks = file_oracle.masks(flat, selected, **ways)
    for name in selected:
        shape = tensors[name].shape
        if name in turned:
            masks[name] = masks[name].reshape(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        masks[name] = masks[name].reshape(shape)
    return masks


@pytest.fixture(params=["whole", "in stripes", "in pieces"])
def sizes(request, monkeypatch):
    """With blocks that fit into memory, and with none that does."""
    if request.param == "in stripes":
        monkeypatch.setattr(in_blocks, "_STRIPE", 24)
    if request.param == "in pieces":
        request.getfixturevalue("small_pieces")


@pytest.mark.parametrize("case", CASES)
def test_equals_the_oracle_of_the_transpose(tmp_path, case, sizes):
    tensors, turned, config = CASES[case]
    source = save(tmp_path / "source", tensors, config=config)
    for which, way in enumerate(WAYS_OF_INPUTS):
        target = tmp_path / f"target{which}"
        plan = planning.plan(source, raw_recipe(**way, include=("*",), exclude=("*.bias",)))
        report = pruning.prune(plan, target)
        masks = expected_along(tensors, turned, way)
        file_oracle.check(source, target, masks, load)
        assert report.num_pruned == plan.num_to_prune
        assert verifying.verify(target, source).problems == ()


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [
        ("layers.0.mlp.experts.up_proj", (2, 8, 8), {"model_type": "new"}),
        ("layers.0.mlp.experts.up_proj", (2, 8, 8), {}),
        ("h.0.attn.c_proj.weight", (8, 8), {}),
        ("layers.0.rg_lru.input_gate_weight", (2, 8, 8), {"model_type": "new"}),
        ("neck.upsample.0.weight", (8, 8, 4), {"model_type": "new"}),
        ("visual.proj", (8, 16), {}),
        ("layers.0.dense.kernel", (8, 16), {"model_type": "bert"}),
    ],
)
def test_what_is_not_known_is_refused_and_can_be_said(tmp_path, name, shape, config):
    tensors = {name: ties(*shape), "layers.1" + name: ties(*shape, seed=1), "b.weight": ties(8, 8)}
    source = save(tmp_path / "source", tensors, config={"x": 0, **config})
    for way in ({"pattern": "2:4"}, {"sparsity": 0.5, "scope": "row"}):
        with pytest.raises(SelectionError, match=r"its input dimension is not\s+known") as error:
            planning.plan(source, raw_recipe(**way))
        assert "--input-dim" in str(error.value) and "input_dims" in str(error.value)
    for scope in ("global", "layer"):
        planning.plan(source, raw_recipe(0.5, scope))
    (facts,) = [f for f in inspect(open_checkpoint(source)) if f.entry.name == name]
    assert facts.num_groups == {}
    for dim in (len(shape) - 1, len(shape) - 2, -1, -2):
        recipe = raw_recipe(pattern="2:4", input_dims={name: dim, "*" + name: dim})
        turned = (
            {n for n in tensors if n.endswith(name)} if dim % len(shape) < len(shape) - 1 else ()
        )
        target = tmp_path / f"along {dim}"
        pruning.prune(planning.plan(source, recipe), target)
        file_oracle.check(source, target, expected_along(tensors, turned, WAYS_OF_INPUTS[0]), load)
        assert verifying.verify(target, source).problems == ()
        given = list(inspect(open_checkpoint(target), input_dims=recipe.input_dims))
        assert all(f.num_kept[2, 4] == f.num_groups[2, 4] == f.entry.numel // 4 for f in given)


@pytest.mark.parametrize(
    ("name", "shape", "model_type", "layout"),
    [
        ("h.0.attn.c_proj.weight", (8, 8), "new", (8, 8, 1, 1)),
        ("h.0.attn.c_proj.weight", (8, 8), "gpt2", (1, 8, 8, 1)),
        ("self_attn.in_proj_weight", (24, 8), "new", (24, 8, 1, 1)),
        ("layers.0.lstm.weight_hh_l0", (16, 4), "new", (16, 4, 1, 1)),
        ("conv.parametrizations.weight.original1", (8, 4, 3), "new", (8, 4, 1, 3)),
        ("in_proj.weight", (8, 4, 1), "new", (8, 4, 1, 1)),
        ("patch.weight", (8, 4, 2, 2), "new", (8, 4, 1, 4)),
    ],
)
def test_layouts_that_are_known(tmp_path, name, shape, model_type, layout):
    source = save(tmp_path / "a", {name: ties(*shape)}, config={"model_type": model_type})
    checkpoint = open_checkpoint(source)
    found = Layouts(checkpoint).of(checkpoint.tensors[0])
    assert (found.outer, found.inputs, found.columns, found.kernel) == layout


def test_transposed_convolutions(tmp_path, sizes):
    """[in, out, kernel]: rows sum over inputs and kernel, N:M goes along the inputs."""
    tensors = {"up.conv.weight": ties(8, 3, 5), "up.conv.bias": ties(3)}
    source = save(tmp_path / "source", tensors)
    turned = {"up.conv.weight": tensors["up.conv.weight"].transpose(0, 1).contiguous()}
    for way in (WAYS_OF_INPUTS[0], WAYS_OF_INPUTS[3]):
        target = tmp_path / way.get("pattern", "row")
        recipe = raw_recipe(**way, input_dims={"up.conv": (0, 2)})
        pruning.prune(planning.plan(source, recipe), target)
        masks = file_oracle.masks(turned, list(turned), **way)
        masks = {name: mask.transpose(0, 1).contiguous() for name, mask in masks.items()}
        if "scope" in way:  # ties in the order of what is stored, not of the transpose
            flat = turned["up.conv.weight"].reshape(3, 40)
            masks["up.conv.weight"] = (
                file_oracle.masks({"m": flat}, ["m"], **way)["m"]
                .reshape(3, 8, 5).transpose(0, 1).contiguous()
            )  # fmt: skip
        file_oracle.check(source, target, masks, load)
        assert verifying.verify(target, source).problems == ()


@pytest.mark.parametrize("dims", [3, -4, (1, 0), (0, 1), (2, 2), (0, 3)])
def test_dimensions_that_are_none(tmp_path, dims):
    source = save(tmp_path / "source", {"a.experts.w": ties(2, 4, 4)})
    with pytest.raises(SelectionError, match="input_dims"):
        planning.plan(source, raw_recipe(0.5, "row", input_dims={"*.w": dims}))


# README.md of a result tells what was done, and nothing that is not so; verify derives it.


CARD = """---
license: llama3.2
language: [en, de]
tags:
- llama
base_model: meta/Base
base_model_relation: finetune
model-index:
- name: x
  results: []
---
# Llama

The original *text*, with | and `code`.
"""
MADE = {
    "model.embed_tokens.weight": torch.ones(4, 8),
    **{
        f"model.layers.{i}.mlp.{kind}.weight": torch.arange(1.0, 33).reshape(4, 8) + i / 4
        for i in range(2)
        for kind in ("up_proj", "down_proj")
    },
}


def source_of(path, card=CARD, tensors=MADE, **config):
    source = save(path, tensors, config={"model_type": "tiny", **config})
    if card is not None:
        (source / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    return source


def prune(source, target, recipe=raw_recipe(0.5)):  # noqa: B008
    pruning.prune(planning.plan(source, recipe), target)
    found = (target / "README.md").read_bytes()
    assert verifying.verify(target, source).problems == ()
    return found


def metadata(card):
    values, below = model_card.split_front_matter(card)
    return values, below.decode(errors="replace")


def test_a_card_says_what_was_done(tmp_path):
    found = prune(source_of(tmp_path / "source"), tmp_path / "out")
    values, text = metadata(found)
    assert values == {
        "license": "llama3.2", "language": ["en", "de"], "tags": ["llama", "pruned", "sparse"],
        "base_model": "meta/Base", "base_model_relation": "finetune",
    }  # fmt: skip
    assert "exactly 64 of 128 selected weights (50.00 %)" in text
    assert f"distprune {distprune.__version__} pruned" in text and "not measured" in text
    assert "nor dense multiplication faster" in text and "distprune verify" in text
    said = text.split("```yaml\n")[1].split("```")[0]
    assert said == (tmp_path / "out" / "distprune" / "recipe.yaml").read_text()
    assert found.endswith(CARD.partition("---\n# ")[2].encode())
    assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("models--org--Name-1.5/snapshots/0123abc", "org/Name-1.5"),
        ("models--gpt2/snapshots/0123abc", "gpt2"),
        ("source", None),
    ],
)
def test_the_base_model_is_the_source(tmp_path, place, wanted):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    source = source_of(tmp_path / place)
    values, text = metadata(prune(source, tmp_path / "out"))
    assert values["base_model"] == (wanted or "meta/Base")
    assert ("base_model_relation" in values) is (wanted is None)
    assert (f"[{wanted}](https://huggingface.co/{wanted})" in text) is (wanted is not None)


def test_no_card_copies_that_of_the_source(tmp_path):
    source = source_of(tmp_path / "source")
    assert prune(source, tmp_path / "out", raw_recipe(0.5, card=False)) == CARD.encode()


def test_a_result_pruned_again_has_one_card_over_the_other(tmp_path):
    source = source_of(tmp_path / "source")
    first = prune(source, tmp_path / "first")
    again = prune(tmp_path / "first", tmp_path / "second", raw_recipe(0.75))
    values, text = metadata(again)
    assert values["tags"] == ["llama", "pruned", "sparse"]
    assert "exactly 96 of 128" in text and text.endswith(metadata(first)[1].lstrip("\n"))


@pytest.mark.parametrize(
    "card",
    [
        None, b"", b"# Only text\n", b"---\nnot: [a\nmapping\n---\ntext\n", b"---\n- 1\n---\n",
        b"---\na: 2024-13-32\n---\n", b"\xff\xfe\x00 no UTF-8\r\n",
    ],
)  # fmt: skip
def test_a_source_without_metadata(tmp_path, card):
    found = prune(source_of(tmp_path / "source", card), tmp_path / "out")
    assert metadata(found)[0] == {"tags": ["pruned", "sparse"]}
    assert found.endswith(card or b"") and (b"card of the source" in found) is bool(card)
