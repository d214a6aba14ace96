"""Causal language models of transformers: each runs layer by layer, or `plan` refuses it."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distprune import language_models, streaming
from helpers.recipes import raw_recipe
from helpers.sampling import every
from helpers.streaming import tokens
from helpers.tiny_transformers import FAMILIES

RECIPE = raw_recipe(sparsity=0.5, score="fisher", normalize=None)
# Whatever of it a family has.
SMALL = {
    "vocab_size": 40, "hidden_size": 16, "d_model": 16, "n_embd": 16, "intermediate_size": 24,
    "ffn_dim": 24, "d_ff": 24, "n_inner": 24, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2,
    "n_head": 2, "n_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 12, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8,
}  # fmt: skip
MORE = {
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4,
        "mamba_chunk_size": 8,
    },
    "DbrxForCausalLM": {
        **FAMILIES["dbrx"][1],
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
    },
}  # fmt: skip
# Those whose layers return tuples, share a state, or multiply it.
ODD = ["Bloom", "Falcon", "Mpt", "GPTNeo", "Rwkv", "FalconH1", "Dbrx", "Llama"]
# Their tensors have other names than their parameters, so that statistics are not found.
RENAMED = {
    "AXK2ForCausalLM", "AriaTextForCausalLM", "BailingHybridForCausalLM", "LagunaForCausalLM"
}  # fmt: skip
NAMES = sorted(
    {n for n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(n, str)}
    - {f"{name}ForCausalLM" for name in ODD}
    - RENAMED
    - {"DoryForCausalLM"}  # refused by name, but not by plan: only real weights show it
)


def small_model(name):
    """A model, or a skip: its configuration needs other sizes."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class
    try:
        known = {*vars(config()), *getattr(config, "attribute_map", {})}
        sizes = {key: value for key, value in SMALL.items() if key in known}
        sizes = MORE[name] if name == "DbrxForCausalLM" else sizes | MORE.get(name, {})
        with torch.device("meta"):
            assert sum(p.numel() for p in cls(config(**sizes)).parameters()) < 1e6, "it is large"
        torch.manual_seed(0)
        model = cls(config(**sizes)).eval()
        with torch.no_grad():
            model(input_ids=tokens(1, 1).tokens, use_cache=False)
    except Exception as error:
        pytest.skip(f"{name} is not made of these sizes: {error}")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", every(12, NAMES))
def test_other_families(tmp_path, name):
    run_or_be_refused(tmp_path, name, small_model(name))


@pytest.mark.parametrize("name", ODD)
def test_families_whose_layers_return_other_things(tmp_path, name):
    """But for DBRX, of whose experts the inputs are not known, by which weights are moved."""
    name = f"{name}ForCausalLM"
    assert run_or_be_refused(tmp_path, name, small_model(name)) == ("Dbrx" not in name)


def run_or_be_refused(tmp_path, name, model):
    """Whether it runs, with the whole model's perplexity; else ``plan`` says the same."""
    source, text = tmp_path / "source", tokens(2, seed=1)
    model.save_pretrained(source)
    try:
        made = streaming.prune_folder(source, tmp_path / "out", RECIPE, text, evaluation=text)
    except (NotImplementedError, ValueError) as error:
        with pytest.raises(type(error)) as planned:
            streaming.estimate(source, RECIPE, len(text), text.length)
        assert str(planned.value) == str(error)
        assert not list(tmp_path.glob("out*"))
        return False
    whole = language_models.perplexity(language_models.load_sharded(source), text)
    assert made.before == pytest.approx(whole.perplexity, rel=1e-6)
    return True
