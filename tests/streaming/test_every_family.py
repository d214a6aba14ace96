"""Causal language models of transformers: each runs layer by layer, or `plan` refuses it."""

import zlib

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from distprune import language_models, streaming
from distprune.files.errors import SelectionError
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
    "q_lora_rank": 8, "index_head_dim": 8, "index_topk": 8, "n_group": 1, "topk_group": 1,
    "rotary_dim": 4, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_encoder_layers": 1, "num_decoder_layers": 2,
    "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "dim_ff": 24, "dim_head": 8,
    "unpadded_vocab_size": 40, "swa_head_dim": 8, "vocab_size_per_layer_input": 40,
    "hidden_size_per_layer_input": 8, "pronunciation_vocab_size": 40, "shape_vocab_size": 40,
    "pronunciation_embed_dim": 8, "shape_embed_dim": 8, "image_size": 16, "patch_size": 8,
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
    "BambaForCausalLM": {"mamba_n_heads": 4, "mamba_d_head": 8},
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 4, "mamba_d_head": 8},
    "Mamba2ForCausalLM": {"num_heads": 4, "n_groups": 1},
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "ReformerModelWithLMHead": {"is_decoder": True, "axial_pos_embds": False},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "KimiLinearForCausalLM": {"linear_head_dim": 8},
}  # fmt: skip
# Those whose layers return tuples, share a state, or multiply it; whose tensors have other names
# than the parameters that they become, or become several; and whose layers run in a loop.
ODD = [
    "BloomForCausalLM", "FalconForCausalLM", "MptForCausalLM", "GPTNeoForCausalLM",
    "RwkvForCausalLM", "FalconH1ForCausalLM", "DbrxForCausalLM", "LlamaForCausalLM",
    "AriaTextForCausalLM", "LagunaForCausalLM", "LaraMiniForCausalLM", "DoryForCausalLM",
]  # fmt: skip
# What has no small form here: it takes audio, images or states, or needs sizes of its own.
UNMADE = [
    "BltForCausalLM", "CohereCompassForCausalLM", "Gemma3nForConditionalGeneration",
    "Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM",
    "GotOcr2ForConditionalGeneration", "MiMoV2FlashForCausalLM", "MusicgenForCausalLM",
    "MusicgenMelodyForCausalLM", "Phi4MultimodalForCausalLM", "Zamba2ForCausalLM",
    "ZambaForCausalLM",
]  # fmt: skip
# No chain of layers, layers in an encoder, or experts of which no inputs are known.
REFUSED = [
    "BertGenerationDecoder", "BertLMHeadModel", "BigBirdForCausalLM", "BioGptForCausalLM",
    "BlenderbotForCausalLM", "BlenderbotSmallForCausalLM", "CTRLLMHeadModel",
    "CamembertForCausalLM", "CpmAntForCausalLM", "Data2VecTextForCausalLM", "DbrxForCausalLM",
    "DeepseekV4ForCausalLM", "DoryForCausalLM", "ElectraForCausalLM", "Emu3ForCausalLM",
    "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM", "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration", "GitForCausalLM", "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM",
    "HYV4ForCausalLM", "HrmTextForCausalLM", "Inkling2ForCausalLM", "Inkling2LoopForCausalLM",
    "InklingForCausalLM", "LaraMiniForCausalLM", "Llama4ForCausalLM", "LongcatFlashForCausalLM",
    "MarianForCausalLM", "MegatronBertForCausalLM", "MllamaForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration", "MvpForCausalLM", "OpenAIGPTLMHeadModel",
    "PegasusForCausalLM", "ProphetNetForCausalLM", "Qwen4ExpForCausalLM",
    "RecurrentGemmaForCausalLM", "ReformerModelWithLMHead", "RemBertForCausalLM",
    "RoCBertForCausalLM", "RoFormerForCausalLM", "RobertaForCausalLM",
    "RobertaPreLayerNormForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM",
    "XLMWithLMHeadModel", "XLNetLMHeadModel", "XmodForCausalLM", "ZayaForCausalLM",
]  # fmt: skip
ALL = {n for n in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(n, str)}
# In an order that has nothing to do with families, of which several begin alike.
NAMES = sorted(ALL - {*ODD, *UNMADE}, key=lambda name: zlib.crc32(name.encode()))


def small_sizes(config):
    """What :data:`SMALL` says of the arguments of a class, and of the configurations in it."""
    large = config()
    known = {*vars(large), *getattr(config, "attribute_map", {})}
    sizes = {key: value for key, value in SMALL.items() if key in known}
    parts = {name: getattr(large, name, None) for name in getattr(config, "sub_configs", {})}
    return sizes | {n: small_sizes(type(p)) for n, p in parts.items() if hasattr(p, "to_dict")}


def small_model(name):
    """A model of a class."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class
    sizes = {} if name == "DbrxForCausalLM" else small_sizes(config)
    sizes |= MORE.get(name, {})
    with torch.device("meta"):
        assert sum(p.numel() for p in cls(config(**sizes)).parameters()) < 1e6
    torch.manual_seed(0)
    return cls(config(**sizes)).eval()


@pytest.mark.parametrize("name", [*ODD, *every(8, NAMES)])
def test_families(tmp_path, name):
    """It runs, with the whole model's perplexity, or is refused, by ``plan`` in the same words."""
    source, text = tmp_path / "source", tokens(2, seed=1)
    small_model(name).save_pretrained(source)
    if name in REFUSED:
        with pytest.raises((NotImplementedError, ValueError, SelectionError)) as planned:
            streaming.estimate(source, RECIPE, len(text), text.length)
        with pytest.raises(planned.type) as refused:
            streaming.prune_folder(source, tmp_path / "out", RECIPE, text, evaluation=text)
        assert str(planned.value) == str(refused.value)
        assert not list(tmp_path.glob("out*"))
        return
    made = streaming.prune_folder(source, tmp_path / "out", RECIPE, text, evaluation=text)
    whole = language_models.perplexity(language_models.load_sharded(source), text)
    assert made.before == pytest.approx(whole.perplexity, rel=1e-6)
