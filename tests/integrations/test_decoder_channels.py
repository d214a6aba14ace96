"""The preset of channels names those of transformers' own classes: without them, nothing else."""

import copy

import pytest
import torch

import distprune as prune
from distprune.integrations.channels import FAMILIES, decoder_channels
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.causal_language_models import small_model
from helpers.comparisons import assert_nothing_wrong
from helpers.tiny_transformers import tiny_model

# By family: the class. head_dim differs from hidden / heads, but in a Qwen 2.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def grouped_model(family):
    """A tiny model in which two query heads share each key-value head."""
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    model = small_model(CLASSES[family], num_attention_heads=4, **biases)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", sorted({*FAMILIES, *CLASSES}))
def test_a_channel_reaches_the_output_through_its_own_parts_only(family):
    """Whatever goes into a pruned channel, nothing comes out of it; and the others do not change.

    So the groups are right: the model with the channels masked computes what it computes with the
    outputs of the same channels set to zero where they enter down_proj and o_proj.
    """
    model = grouped_model(family)
    expected = copy.deepcopy(model)
    groups = decoder_channels(model)
    assert list(groups) == [
        f"model.layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn", "mlp")
    ]
    for name, parts in groups.items():
        prune.global_structured({name: parts}, amount=0.4)
    for parts in groups.values():
        last = [part for part in parts if part.dim == 1]
        assert len(last) == 1
        dead = (last[0].parameter[0].weight_mask == 0).all(0)
        assert 0 < int(dead.sum()) < dead.numel() and int(dead.sum()) % last[0].size == 0
        layer = expected.get_submodule(last[0].label.removesuffix(".weight"))

        def without(_, args, dead=dead):
            return (args[0].masked_fill(dead, 0.0),)

        layer.register_forward_pre_hook(without)
    tokens = torch.arange(3, 19).view(2, 8)
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)
    # Rows that were left would be seen by no output: those of the masked channels are all masked.
    for parts in groups.values():
        for part in parts:
            mask = getattr(part.parameter[0], f"{part.parameter[1]}_mask")
            rows = mask.movedim(part.dim, 0).flatten(1) if mask.ndim > 1 else mask.unsqueeze(1)
            of_channel = rows.unflatten(0, (-1, part.size)).flatten(1)
            assert ((of_channel == 0).all(1) | (of_channel == 1).all(1)).all(), part.label
    assert prune.verify(model).ok


def test_parts_are_chosen_and_others_refused():
    model = tiny_model("llama")
    assert {name[-3:] for name in decoder_channels(model, heads=False)} == {"mlp"}
    assert {name[-9:] for name in decoder_channels(model, neurons=False)} == {"self_attn"}
    with pytest.raises(ValueError, match="heads=False"):
        decoder_channels(model, heads=False, neurons=False)
    for family in ("mixtral", "gpt2"):
        with pytest.raises(NotImplementedError, match="family"):
            decoder_channels(tiny_model(family))
    model.model.layers[1].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(NotImplementedError, match=r"layers\.1\.mlp\.up_proj is a Identity"):
        decoder_channels(model)


def described(groups):
    return [
        (name, [(part.label, part.dim, part.size, part.is_ranked) for part in parts])
        for name, parts in groups.items()
    ]


def differences(wrapper: str) -> list[str]:
    """The groups of a wrapped model have the names and parts of those of the plain one."""
    model = grouped_model("qwen2")
    expected = described(decoder_channels(model))
    model = wrappings.wrap(model, wrapper)
    groups = decoder_channels(model)
    report = prune.global_structured(groups, amount=0.4)
    wrong = [] if report.num_pruned else ["nothing is pruned"]
    return wrong if described(groups) == expected else [*wrong, f"{groups}"]


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["fsdp2_root-2", "fsdp1_root-2"])
def test_wrapped_models_have_the_same_groups(wrapper):
    assert_nothing_wrong(run_ranks(differences, 2, wrapper))
