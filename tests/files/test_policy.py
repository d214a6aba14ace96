"""Which tensors are selected, why the others are not, and what is refused."""

import json

import pytest
import torch

from distprune.base.schedules import OneShot
from distprune.files.checkpoint import open_checkpoint
from distprune.files.errors import SelectionError
from distprune.files.planning import plan
from distprune.files.selecting import select_tensors
from distprune.recipes import Recipe
from helpers import tiny_checkpoints
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import save

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
    assert {entry.name: reason for entry, _, reason in found.verdicts if reason} == {
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


# Heads, adapters and other two-dimensional tensors that are not weights of layers stay dense.


HEAD = "the output head"
TABLE = "a table of relative positions"
LEARNED = "a learned input"
KEPT = {
    "classifier.weight": HEAD, "classifier.out_proj.weight": HEAD, "score.weight": HEAD,
    "head.weight": HEAD, "model.head.fc.weight": HEAD, "cls.predictions.transform.weight": HEAD,
    "qa_outputs.weight": HEAD, "lm_head.dense.weight": HEAD, "pre_classifier.weight": HEAD,
    "output.weight": HEAD, "fc.weight": HEAD, "proj_out.weight": HEAD, "embed_out.weight": HEAD,
    "v_head.summary.weight": HEAD, "pred_layer.proj.weight": HEAD, "decoder_pred.weight": HEAD,
    "block.0.SelfAttention.relative_attention_bias.weight": TABLE,
    "layer.0.relative_position_bias_table": TABLE, "blocks.0.attn.rel_pos_h": TABLE,
    "layers.0.attention_biases": TABLE,
    "pos_embed": "an embedding", "vit.embeddings.position_embeddings": "an embedding",
    "model.patch_conv.weight": "an embedding", "transformer.w.weight": "an embedding",
    "mixer.A_log": "the constants of a state space", "mixer.D": "the constants of a state space",
    "mixer.dt_bias": "a bias", "attn.bias_u": "a bias", "attn.r_w_bias": "a bias",
    "mask_tokens.weight": LEARNED, "query_tokens": LEARNED, "resampler.latents": LEARNED,
    "base.layers.0.q.lora_A.weight": "part of an adapter",
    "base.layers.0.q.lora_B.default.weight": "part of an adapter",
    "layers.0.mlp.w1.weight_scale": "scales of quantised weights",
}  # fmt: skip
PRUNED = [
    "attention.self.query.weight", "attn.q_head.weight", "cross_attn_image_to_token.q_proj.weight",
    "roberta_prelayernorm.encoder.layer.0.output.dense.weight", "layers.0.fc.weight",
    "blocks.0.norm_attn_norm.attn.Wqkv.weight", "layers.0.output.weight", "inject_scale.map.weight",
    "layers.0.attn.proj_out.weight", "mlp.d.weight", "encoder.layers.0.w.weight", "pooler.weight",
    "shared_expert.up_proj.weight", "layers.0.gate_proj.weight", "heads.0.key.weight",
]  # fmt: skip


def test_names(tmp_path):
    tensors = {name: torch.ones(4, 4) for name in [*KEPT, *PRUNED]}
    source = save(tmp_path / "source", tensors)
    verdicts, _ = select_tensors(open_checkpoint(source), raw_recipe(0.5))
    found = {entry.name: reason for entry, _, reason in verdicts}
    assert {name: found[name] for name in KEPT} == KEPT
    assert {name: found[name] for name in PRUNED} == dict.fromkeys(PRUNED, "")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((8,), "fewer than 2 dimensions"),
        ((1, 8), "fewer than 2 dimensions that are larger than 1"),
        ((8, 1), "fewer than 2 dimensions that are larger than 1"),
        ((1, 1, 8), "fewer than 2 dimensions that are larger than 1"),
        ((8, 1, 1, 1), "fewer than 2 dimensions that are larger than 1"),
        ((8, 1, 4), "a convolution of single channels"),
        ((8, 1, 3, 3), "a convolution of single channels"),
        ((8, 2, 4), ""),
        ((1, 8, 4), ""),
        ((2, 2), ""),
    ],
)
def test_shapes(tmp_path, shape, reason):
    source = save(
        tmp_path / "source", {"a.weight": torch.ones(shape), "b.weight": torch.ones(4, 4)}
    )
    verdicts, _ = select_tensors(open_checkpoint(source), raw_recipe(0.5))
    assert [reason for *_, reason in verdicts] == [reason, ""]
    # Named one by one they are pruned; the number of dimensions is asked for on its own.
    for recipe in ({"include": ("*",)}, {"also": ("a",)}):
        verdicts, _ = select_tensors(open_checkpoint(source), raw_recipe(0.5, min_ndim=1, **recipe))
        assert [reason for *_, reason in verdicts] == ["", ""]


ADAPTER = {
    "base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, 8),
    "base_model.model.layers.0.q_proj.lora_B.weight": torch.ones(8, 2),
}


def test_the_factors_of_an_adapter_are_pruned_if_asked_for(tmp_path):
    source = save(tmp_path / "source", ADAPTER)
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    (source / "config.json").unlink()
    with pytest.raises(SelectionError, match="2 tensors are left out as part of an adapter"):
        plan(source, raw_recipe(0.5))
    assert plan(source, raw_recipe(0.5, include=("*",))).num_elements == 32
    assert plan(source, raw_recipe(0.5, also=("*.lora_?",))).num_elements == 32


def test_a_model_with_adapters_inside_is_pruned_without_them(tmp_path):
    source = save(
        tmp_path / "source", ADAPTER | {"layers.0.q_proj.base_layer.weight": torch.ones(8, 8)}
    )
    (source / "adapter_config.json").write_text("{}")
    assert plan(source, raw_recipe(0.5)).num_elements == 64


def test_an_exclude_that_matches_nothing_is_a_warning(tmp_path):
    source = save(tmp_path / "source", {"a.weight": torch.ones(4, 4)})
    found = plan(source, raw_recipe(0.5, exclude=("lm_head", "re:b.*")))
    assert [warning.split(" matches")[0] for warning in found.warnings] == [
        "exclude: 'lm_head'",
        "exclude: 're:b.*'",
    ]
    assert not plan(source, raw_recipe(0.5)).warnings
    with pytest.raises(SelectionError, match="include: 'b' matches none"):
        plan(source, raw_recipe(0.5, include=("b",), exclude=("c",)))
