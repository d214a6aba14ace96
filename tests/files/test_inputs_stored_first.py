"""N:M and rows go along the inputs where weights are stored [in, out]; inspect and verify agree."""

import pytest
import torch

from distprune.files import planning, pruning, verifying
from distprune.files.checkpoint import open_checkpoint
from distprune.files.errors import SelectionError
from distprune.files.selecting import Layouts
from distprune.files.verifying import inspect
from distprune.ranking import in_blocks
from helpers import file_oracle, tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import load

WAYS = [
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


def expected(tensors, turned, way):
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
    source = tiny_checkpoints.save(tmp_path / "source", tensors, config=config)
    for which, way in enumerate(WAYS):
        target = tmp_path / f"target{which}"
        plan = planning.plan(source, raw_recipe(**way, include=("*",), exclude=("*.bias",)))
        report = pruning.prune(plan, target)
        masks = expected(tensors, turned, way)
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
    source = tiny_checkpoints.save(tmp_path / "source", tensors, config={"x": 0, **config})
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
        file_oracle.check(source, target, expected(tensors, turned, WAYS[0]), load)
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
    source = tiny_checkpoints.save(
        tmp_path / "a", {name: ties(*shape)}, config={"model_type": model_type}
    )
    checkpoint = open_checkpoint(source)
    found = Layouts(checkpoint).of(checkpoint.tensors[0])
    assert (found.outer, found.inputs, found.columns, found.kernel) == layout


def test_transposed_convolutions(tmp_path, sizes):
    """[in, out, kernel]: rows sum over inputs and kernel, N:M goes along the inputs."""
    tensors = {"up.conv.weight": ties(8, 3, 5), "up.conv.bias": ties(3)}
    source = tiny_checkpoints.save(tmp_path / "source", tensors)
    turned = {"up.conv.weight": tensors["up.conv.weight"].transpose(0, 1).contiguous()}
    for way in (WAYS[0], WAYS[3]):
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
    source = tiny_checkpoints.save(tmp_path / "source", {"a.experts.w": ties(2, 4, 4)})
    with pytest.raises(SelectionError, match="input_dims"):
        planning.plan(source, raw_recipe(0.5, "row", input_dims={"*.w": dims}))
