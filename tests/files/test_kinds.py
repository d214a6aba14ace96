"""Layers and kinds of weights, by names of tensors as model families have them."""

import pytest

from distprune.files.text import Role, role_of, short_names

PLACES = {
    "model.layers.12.mlp.up_proj.weight": ("model.layers", (12,), "mlp.up_proj"),
    "model.layers.12.self_attn.q_proj.bias": ("model.layers", (12,), "self_attn.q_proj.bias"),
    "h.0.attn.c_proj.weight": ("h", (0,), "attn.c_proj"),
    "encoder.layer.3.attention.output.dense.weight": (
        "encoder.layer", (3,), "attention.output.dense",
    ),
    "model.layers.1.mlp.experts.7.gate_proj.weight": (
        "model.layers", (1,), "mlp.experts.gate_proj",
    ),
    "model.layers.1.mlp.experts.gate_up_proj": ("model.layers", (1,), "mlp.experts.gate_up_proj"),
    "decoder.layers.2.ffn.experts.expert_11.fc1.weight": (
        "decoder.layers", (2,), "ffn.experts.expert.fc1",
    ),
    "encoder.block.0.layer.1.DenseReluDense.wi.weight": (
        "encoder.block", (0,), "layer.1.DenseReluDense.wi",
    ),
    "swin.encoder.layers.2.blocks.5.mlp.fc1.weight": ("swin.encoder.layers", (2, 5), "mlp.fc1"),
    "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q.weight": (
        "down_blocks", (0,), "attentions.1.transformer_blocks.0.attn1.to_q",
    ),
    "model.embed_tokens.weight": ("", (), "model.embed_tokens"),
    "lm_head.weight": ("", (), "lm_head"),
    "weight": ("", (), "weight"),
    "0.weight": ("", (0,), "weight"),
    "logit_scale": ("", (), "logit_scale"),
    "a.1" + "0" * 5000 + ".weight": ("", (), "a.1" + "0" * 5000),
    "a.٣.weight": ("", (), "a.٣"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES, ids=lambda name: name[:40])
def test_a_name_says_where_a_tensor_is(name):
    assert role_of(name) == Role(*PLACES[name])


def test_kinds_are_as_short_as_tells_them_apart():
    assert short_names(["mlp.up_proj", "attn.q"]) == {"mlp.up_proj": "up_proj", "attn.q": "q"}
    kinds = ["attn.c_proj", "mlp.c_proj", "c_proj"]
    assert short_names(kinds) == {kind: kind for kind in kinds}
    names = [".".join(parts) for a in "ab" for b in "ab" for parts in ([a], [a, b], [b, a, b])]
    short = short_names(names)
    assert set(short) == set(names) and len(set(short.values())) == len(set(names))
