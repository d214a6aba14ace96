"""Which tensors are selected, why the others are not, and what is refused."""

import json

import pytest
import torch

from distprune.base.schedules import OneShot
from distprune.files.errors import SelectionError
from distprune.files.planning import plan
from distprune.recipes import Recipe
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe

M = torch.ones(4, 8)
LLAMA = {
    "model.embed_tokens.weight": M,
    "model.layers.0.self_attn.q_proj.weight": M,
    "model.layers.0.self_attn.q_proj.bias": torch.ones(8),
    "model.layers.0.input_layernorm.weight": torch.ones(8),
    "model.layers.0.mlp.gate_proj.weight": M,
    "model.layers.0.mlp.gate.weight": M,
    "model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 8),
    "model.layers.0.mlp.experts.gate_up_proj_bias": torch.ones(2, 4),
    "model.layers.0.position_ids": torch.ones(2, 4, dtype=torch.int64),
    "model.layers.0.empty.weight": torch.ones(0, 4),
    "model.layers.10.self_attn.q_proj.weight": M,
    "model.layers.2.self_attn.q_proj.weight": M,
    "lm_head.weight": M,
}


def make(tmp_path, tensors=LLAMA, **config):
    return tiny_checkpoints.save(tmp_path / "source", tensors, config=config)


def reasons(found):
    return {entry.name: reason for entry, _, reason in found.verdicts}


def test_the_default_selection_and_its_order(tmp_path):
    found = plan(make(tmp_path), raw_recipe(0.5))
    assert [t.entry.name for t in found.tensors] == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.10.self_attn.q_proj.weight",
    ]
    assert (found.num_elements, found.num_to_prune) == (192, 96)
    assert {name: reason for name, reason in reasons(found).items() if reason} == {
        "model.embed_tokens.weight": "an embedding",
        "model.layers.0.self_attn.q_proj.bias": "fewer than 2 dimensions",
        "model.layers.0.input_layernorm.weight": "fewer than 2 dimensions",
        "model.layers.0.mlp.gate.weight": "a router",
        "model.layers.0.mlp.experts.gate_up_proj_bias": "a bias",
        "model.layers.0.position_ids": "I64 is no float",
        "model.layers.0.empty.weight": "no elements",
        "lm_head.weight": "the output head",
    }


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ({"include": ("*.wieght",)}, "'*.wieght' matches none of the 13 tensors"),
        ({"also": ("re:nothing",)}, "also: 're:nothing' matches none"),
        ({"input_dims": {"nothing": 0}}, "input_dims: 'nothing' matches none"),
        ({"include": ("*q_proj.bias",)}, "nothing is selected"),
        ({"include": ("*position_ids",)}, "is I64; expected one of"),
    ],
)
def test_selections_that_are_refused(tmp_path, recipe, text):
    with pytest.raises(SelectionError) as error:
        plan(make(tmp_path), raw_recipe(0.5, **recipe))
    assert text in str(error.value)


def test_a_pattern_has_to_divide_the_inputs(tmp_path):
    tensors = {"a.weight": torch.ones(4, 6), "c.weight": torch.ones(3, 4, 3, 3)}
    source = make(tmp_path, tensors)
    with pytest.raises(SelectionError, match=r"a.weight has 6 inputs .* 4 does not divide"):
        plan(source, raw_recipe(pattern="2:4"))
    assert plan(source, raw_recipe(pattern="2:4", exclude=("a.weight",))).num_to_prune == 54


def test_fp8_is_refused_by_name_unless_it_is_left_out(tmp_path):
    source = make(tmp_path, {"a.weight": M, "b.weight": M})
    path = source / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["b.weight"] |= {"dtype": "F8_E4M3", "shape": [4, 32]}
    path.write_bytes(tiny_checkpoints.encode(header, raw[8 + length :]))
    with pytest.raises(SelectionError, match=r"b\.weight is F8_E4M3;"):
        plan(source, raw_recipe(0.5))
    assert len(plan(source, raw_recipe(0.5, exclude=("b.*",))).tensors) == 1


@pytest.mark.parametrize("config", [{}, {"text_config": {}}])
def test_tied_weights_that_are_stored_twice(tmp_path, config):
    inner = config.get("text_config", config)
    inner["tie_word_embeddings"] = True
    source = make(tmp_path, **config)
    plan(source, raw_recipe(0.5))
    with pytest.raises(SelectionError, match=r"ties model.embed_tokens.weight and lm_head.weight"):
        plan(source, raw_recipe(0.5, include=("lm_head.weight",)))


@pytest.mark.parametrize(
    "keys", [{"names": "weight"}, {"sparsity": None, "schedule": OneShot(0, 0.5)}]
)
def test_keys_of_models_are_refused(tmp_path, keys):
    with pytest.raises(SelectionError, match="the recipe has schedule or names"):
        plan(make(tmp_path), Recipe(**{"sparsity": 0.5, **keys}))


def test_the_digest_knows_everything_that_decides_the_output(tmp_path):
    source = make(tmp_path)
    digests = {plan(source, raw_recipe(0.5)).digest, plan(source, raw_recipe(0.25)).digest}
    (source / "config.json").write_text("{ }")
    digests.add(plan(source, raw_recipe(0.5)).digest)
    assert len(digests) == 3 and plan(source, raw_recipe(0.5)).digest in digests
