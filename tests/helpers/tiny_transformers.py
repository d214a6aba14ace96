"""Tiny models of transformers' own classes, one of each family, with random weights."""

import torch

_TEXT = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_MOE = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_MAMBA = {"vocab_size": 40, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
_T5 = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "relative_attention_num_buckets": 8,
}  # fmt: skip
_SPEECH = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_DEEPSEEK = {
    **_TEXT, "n_routed_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip

# By name: the class, and the arguments of its config. Those of parts are mappings.
FAMILIES = {
    "bert": ("BertForSequenceClassification", _TEXT),
    "bert_mlm": ("BertForPreTraining", _TEXT),
    "roberta": ("RobertaForSequenceClassification", _TEXT),
    "roberta_prelayernorm": ("RobertaPreLayerNormForMaskedLM", _TEXT),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"vocab_size": 40, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2},
    ),
    "electra": ("ElectraForPreTraining", {**_TEXT, "embedding_size": 8}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "openai_gpt": ("OpenAIGPTLMHeadModel", _GPT2),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", _TEXT),
    "llama": ("LlamaForCausalLM", _TEXT),
    "llama_classifier": ("LlamaForSequenceClassification", _TEXT),
    "mistral": ("MistralForCausalLM", _TEXT),
    "mixtral": ("MixtralForCausalLM", {**_TEXT, "num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", _TEXT),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM", {**_TEXT, **_MOE, "shared_expert_intermediate_size": 12}
    ),
    "qwen3": ("Qwen3ForCausalLM", {**_TEXT, "head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_TEXT, **_MOE, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**_TEXT, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", {**_TEXT, "head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", _TEXT),
    "falcon": ("FalconForCausalLM", _TEXT),
    "bloom": ("BloomForCausalLM", {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _DEEPSEEK),
    "gpt_oss": ("GptOssForCausalLM", {**_TEXT, "head_dim": 8, "num_local_experts": 4}),
    "llama4": (
        "Llama4ForCausalLM",
        {**_TEXT, "head_dim": 8, "intermediate_size_mlp": 24, "num_local_experts": 4},
    ),
    "granitemoe": ("GraniteMoeForCausalLM", {**_TEXT, "num_local_experts": 4}),
    "jetmoe": ("JetMoeForCausalLM", {**_TEXT, "kv_channels": 8, "num_local_experts": 4}),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "vocab_size": 40, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "t5": ("T5ForConditionalGeneration", _T5),
    "bart": ("BartForSequenceClassification", {**_SPEECH, "max_position_embeddings": 32}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_SPEECH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    "wav2vec2": (
        "Wav2Vec2ForCTC",
        {
            **_TEXT, "conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2],
            "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    "vit": ("ViTForImageClassification", _VISION),
    "swin": (
        "SwinForImageClassification",
        {
            "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1],
            "num_heads": [2, 2], "window_size": 4,
        },
    ),
    "clip": ("CLIPModel", {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 12}),
    "siglip": ("SiglipModel", {"text_config": _TEXT, "vision_config": _VISION}),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32},
    ),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "mamba": ("MambaForCausalLM", _MAMBA),
    "mamba2": (
        "Mamba2ForCausalLM",
        {**_MAMBA, "head_dim": 8, "num_heads": 4, "n_groups": 1, "expand": 2, "chunk_size": 8},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 16},
    ),
    "xlnet": ("XLNetLMHeadModel", {"vocab_size": 40, "d_model": 16, "n_layer": 2, "n_head": 2,
                                    "d_inner": 24}),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM", {**_TEXT, "lru_width": 16, "attention_window_size": 8}
    ),
}  # fmt: skip


def tiny_model(family):
    """Make a model of a family; every call gives the same values."""
    import transformers

    name, arguments = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**arguments))
    for parameter in model.parameters():  # norms and biases begin with ones and zeros
        torch.nn.init.normal_(parameter)
    return model.eval()


def save_tiny(family, folder, **options):
    """Write a checkpoint of a tiny model with transformers."""
    tiny_model(family).save_pretrained(folder, **options)
    return folder
