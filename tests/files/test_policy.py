"""Which tensors are selected, why the others are not, and what is refused."""

import json

import pytest
import torch

from distprune.files.errors import SelectionError
from distprune.files.planning import plan
from distprune.files.recipe import FileRecipe
from helpers import tiny_checkpoints

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
    return {verdict.entry.name: verdict.reason for verdict in found.verdicts}


def test_the_default_selection_and_its_order(tmp_path):
    found = plan(make(tmp_path), FileRecipe(0.5))
    assert [t.entry.name for t in found.tensors] == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.10.self_attn.q_proj.weight",
    ]
    assert [t.offset for t in found.tensors] == [0, 64, 96, 128, 160]
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


def test_patterns(tmp_path):
    source = make(tmp_path)
    found = plan(source, FileRecipe(0.5, include=("*proj.weight", "lm_head*"), exclude=("*.2.*",)))
    assert {name for name, reason in reasons(found).items() if not reason} == {
        "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight",
        "model.layers.10.self_attn.q_proj.weight", "lm_head.weight",
    }  # fmt: skip
    assert reasons(found)["model.layers.2.self_attn.q_proj.weight"] == "excluded"
    found = plan(source, FileRecipe(0.5, exclude=(r"re:model\.layers\.\d+\.self.*",)))
    assert len(found.tensors) == 2
    # By the name of a module, as in the library.
    found = plan(source, FileRecipe(0.5, include=("*.q_proj", "lm_head"), exclude=("*.2.*",)))
    assert [tensor.entry.name for tensor in found.tensors] == [
        "lm_head.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.10.self_attn.q_proj.weight",
    ]


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
        plan(make(tmp_path), FileRecipe(0.5, **recipe))
    assert text in str(error.value)


def test_a_pattern_has_to_divide_the_inputs(tmp_path):
    tensors = {"a.weight": torch.ones(4, 6), "c.weight": torch.ones(3, 4, 3, 3)}
    source = make(tmp_path, tensors)
    with pytest.raises(SelectionError, match=r"a.weight has 6 inputs .* 4 does not divide"):
        plan(source, FileRecipe(pattern="2:4"))
    assert plan(source, FileRecipe(pattern="2:4", exclude=("a.weight",))).num_to_prune == 54


def test_fp8_is_refused_by_name_unless_it_is_left_out(tmp_path):
    source = make(tmp_path, {"a.weight": M, "b.weight": M})
    path = source / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["b.weight"] |= {"dtype": "F8_E4M3", "shape": [4, 32]}
    path.write_bytes(tiny_checkpoints.encode(header, raw[8 + length :]))
    with pytest.raises(SelectionError, match=r"b\.weight is F8_E4M3;"):
        plan(source, FileRecipe(0.5))
    assert len(plan(source, FileRecipe(0.5, exclude=("b.*",))).tensors) == 1


@pytest.mark.parametrize("config", [{}, {"text_config": {}}])
def test_tied_weights_that_are_stored_twice(tmp_path, config):
    inner = config.get("text_config", config)
    inner["tie_word_embeddings"] = True
    source = make(tmp_path, **config)
    plan(source, FileRecipe(0.5))
    with pytest.raises(SelectionError, match=r"ties model.embed_tokens.weight and lm_head.weight"):
        plan(source, FileRecipe(0.5, include=("lm_head.weight",)))


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({}, ["has no 'sparsity', 'pattern' or 'schedule'"]),
        (
            {"sparsity": 1.5, "scope": "gobal", "nan": "x"},
            [
                "sparsity: Input should be less than or equal to 1, found 1.5 (float)",
                "scope: Input should be 'global', 'layer' or 'row', found",
                "nan: Input should be 'error' or 'keep', found 'x'",
            ],
        ),
        ({"sparsity": float("nan")}, ["sparsity: Input should be a finite number, found nan"]),
        ({"sparsity": True}, ["sparsity: Input should be a valid number, found True"]),
        ({"pattern": "4:2"}, ["pattern: Value error, expected a pattern N:M such as"]),
        ({"pattern": "2:4", "sparsity": 0.5}, ["sparsity: has no place beside 'pattern'"]),
        ({"pattern": "2:4", "scope": "row"}, ["scope: has no place beside 'pattern'"]),
        ({"pattern": "2:4", "max_sparsity": 0.9}, ["limits: has no place beside 'pattern'"]),
        ({"sparsity": 0.5, "scope": "row", "max_sparsity": 0.9}, ["limits: has no effect with"]),
        ({"sparsity": 0.5, "max_sparsity": 2}, ["max_sparsity: Input should be less"]),
        ({"sparsity": 0.5, "min_sparsity": 0.9, "max_sparsity": 0.8}, ["0.9 is above max_spars"]),
        ({"sparsity": 0.5, "seed": 1}, ["seed: has no effect"]),
        ({"sparsity": 0.5, "score": "random", "seed": -1}, ["seed: Input should be greater"]),
        ({"sparsity": 0.5, "score": "random", "seed": 2**63}, ["seed: Input should be less"]),
        ({"sparsity": 0.5, "include": ()}, ["include: Value error, expected a string or a list"]),
        ({"sparsity": 0.5, "also": None}, ["also: has no value"]),
        ({"sparsity": 0.5, "exclude": ("re:(",)}, ["exclude: Value error, expected a regular"]),
        ({"sparsity": 0.5, "exclude": ("",)}, ["exclude: Value error, expected strings"]),
        ({"sparsity": 0.5, "min_ndim": 0}, ["min_ndim: Input should be greater"]),
        ({"sparsity": 0.5, "min_ndim": None}, ["min_ndim: has no value"]),
        ({"sparsity": 0.5, "masks": 1}, ["masks: Input should be a valid boolean"]),
        ({"sparsity": 0.5, "include": ("a",), "also": ("b",)}, ["'also' adds to the default"]),
        ({"sparsity": 0.5, "input_dims": {"a": "0"}}, ["input_dims: Value error, expected dim"]),
        ({"sparsity": 0.5, "input_dims": {"a": []}}, ["input_dims: Value error, expected dim"]),
        ({"sparsity": 0.5, "input_dims": {"re:(": 0}}, ["input_dims: Value error, expected a reg"]),
        ({"sparsity": 0.5, "input_dims": {"": 0}}, ["input_dims: Value error, expected dim"]),
        ({"sparsity": 0.5, "input_dims": 3}, ["input_dims: Value error, expected dim"]),
        ({"sparsity": 0.5, "input_dims": ["a=0"]}, ["input_dims: Value error, expected dim"]),
        (
            {"sparsity": 0.5, "groups": (3, {"sparsity": 2})},
            [
                "sparsity is given beside groups",
                "groups[0] is 3; expected a recipe",
                "groups[1]: sparsity: Input should be less",
            ],
        ),
        ({"groups": "ab"}, ["groups is 'ab'; expected a list of recipes"]),
        ({"groups": [{"sparsty": 0.5}]}, ["groups[0] is {'sparsty': 0.5}; expected a recipe"]),
        ({"groups": [FileRecipe(0.5)], "min_ndim": 1}, ["min_ndim is given beside groups"]),
        (
            {"groups": [FileRecipe(0.5, nan="keep")]},
            ["groups[0]: nan is 'keep'; expected it beside the groups"],
        ),
        ({"groups": [FileRecipe(0.5)], "seed": 1}, ["seed: has no effect"]),
        ({"groups": [FileRecipe(0.5)] * 129}, ["there are 129 groups; expected at most 128"]),
    ],
)
def test_recipes_that_are_wrong(fields, texts):
    with pytest.raises(SelectionError) as error:
        FileRecipe(**fields)
    assert all(text in str(error.value) for text in texts)


def test_the_digest_knows_everything_that_decides_the_output(tmp_path):
    source = make(tmp_path)
    digests = {plan(source, FileRecipe(0.5)).digest, plan(source, FileRecipe(0.25)).digest}
    (source / "config.json").write_text("{ }")
    digests.add(plan(source, FileRecipe(0.5)).digest)
    assert len(digests) == 3 and plan(source, FileRecipe(0.5)).digest in digests
