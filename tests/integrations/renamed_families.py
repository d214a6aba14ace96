"""Models of transformers, tiny, whose parameters have other names, or shapes, than their files."""

import torch
import transformers as hf
from torch import nn

_ENCODER = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12,
}  # fmt: skip
_DECODER = {
    **_ENCODER, "vocab_size": 32, "num_key_value_heads": 1, "head_dim": 4, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_IMAGE = {"image_size": 8, "patch_size": 4}
_TEXT = {
    **_ENCODER, "vocab_size": 32, "max_position_embeddings": 8, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip

# Twelve experts, of which "10" comes before "2" in the order of letters.
FAMILIES = {
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**_DECODER, "num_local_experts": 12}),
    "qwen2_moe": (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig,
        {
            **_DECODER, "num_experts": 3, "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 6,
        },
    ),
    "vit": (hf.ViTForImageClassification, hf.ViTConfig, {**_ENCODER, **_IMAGE}),
    "swin": (
        hf.SwinForImageClassification,
        hf.SwinConfig,
        {
            "image_size": 16, "patch_size": 2, "embed_dim": 4, "depths": [1, 1],
            "num_heads": [2, 2], "window_size": 2,
        },
    ),
    "clip": (
        hf.CLIPModel,
        hf.CLIPConfig,
        {"text_config": _TEXT, "vision_config": {**_ENCODER, **_IMAGE}, "projection_dim": 4},
    ),
    "dinov2": (
        hf.Dinov2ForImageClassification,
        hf.Dinov2Config,
        {**_ENCODER, **_IMAGE, "use_swiglu_ffn": True},
    ),
    "bert": (hf.BertForSequenceClassification, hf.BertConfig, _TEXT),
    "gpt2": (
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {
            "vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2,
            "bos_token_id": None, "eos_token_id": None,
        },
    ),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, _DECODER),
    # One tensor becomes three ...
    "nomic_bert": (
        hf.NomicBertModel,
        hf.NomicBertConfig,
        {**_ENCODER, "vocab_size": 32, "max_position_embeddings": 8},
    ),
    # ... and three become one.
    "olmo_hybrid": (
        hf.OlmoHybridForCausalLM,
        hf.OlmoHybridConfig,
        {
            **_DECODER, "num_key_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4,
        },
    ),
    "llava": (
        hf.LlavaForConditionalGeneration,
        hf.LlavaConfig,
        {
            "text_config": {"model_type": "llama", **_DECODER},
            "vision_config": {"model_type": "clip_vision_model", **_ENCODER, **_IMAGE},
            "image_token_index": 1,
        },
    ),
    # Experts that are transposed on loading if they have another shape, under the same name.
    "qwen3_vl_moe": (
        hf.Qwen3VLMoeForConditionalGeneration,
        hf.Qwen3VLMoeConfig,
        {
            "tie_word_embeddings": False,
            "text_config": {
                **_DECODER, "tie_word_embeddings": False, "num_experts": 3,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 6, "decoder_sparse_step": 1,
                "rope_parameters": {
                    "rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4,
                },
            },
            "vision_config": {
                "depth": 1, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2,
                "patch_size": 2, "spatial_merge_size": 1, "temporal_patch_size": 1,
                "out_hidden_size": 8, "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
}  # fmt: skip


def make(family: str, **changes) -> nn.Module:
    """A model of a family without any zero among its weights."""
    cls, config, settings = FAMILIES[family]
    model = cls(config(**{**settings, **changes}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter[parameter == 0] = 1
    return model


def save(family: str, folder, **changes):
    """Write a checkpoint as transformers does."""
    make(family, **changes).save_pretrained(folder)
    return folder
