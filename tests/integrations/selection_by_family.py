"""Which matrices of some forty families are pruned by default; all others are kept."""

_BERT = "intermediate.dense output.dense self.key self.query self.value"
_GPT2 = "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"
_LLAMA = """
    mlp.down_proj mlp.gate_proj mlp.up_proj self_attn.k_proj self_attn.o_proj
    self_attn.q_proj self_attn.v_proj
"""
# The last two parts of names, without numbers and "weight"; read and judged one by one.
PRUNED = {
    "bert": """
        intermediate.dense output.dense pooler.dense self.key self.query self.value
    """,
    "bert_mlm": """
        intermediate.dense output.dense pooler.dense self.key self.query self.value
    """,
    "roberta": _BERT,
    "roberta_prelayernorm": _BERT,
    "distilbert": """
        attention.k_lin attention.out_lin attention.q_lin attention.v_lin ffn.lin1 ffn.lin2
    """,
    "electra": _BERT,
    "gpt2": _GPT2,
    "openai_gpt": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": """
        attention.dense attention.query_key_value mlp.dense_4h_to_h mlp.dense_h_to_4h
    """,
    "llama": _LLAMA,
    "llama_classifier": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": """
        self_attn.k_proj self_attn.o_proj self_attn.q_proj self_attn.v_proj w1 w2 w3
    """,
    "qwen2": _LLAMA,
    "qwen2_moe": """
        down_proj gate_proj self_attn.k_proj self_attn.o_proj self_attn.q_proj self_attn.v_proj
        shared_expert.down_proj shared_expert.gate_proj shared_expert.up_proj up_proj
    """,
    "qwen3": _LLAMA,
    "qwen3_moe": """
        down_proj gate_proj self_attn.k_proj self_attn.o_proj self_attn.q_proj self_attn.v_proj
        up_proj
    """,
    "gemma2": _LLAMA,
    "gemma3": _LLAMA,
    "phi3": """
        mlp.down_proj mlp.gate_up_proj self_attn.o_proj self_attn.qkv_proj
    """,
    "falcon": """
        mlp.dense_4h_to_h mlp.dense_h_to_4h self_attention.dense self_attention.query_key_value
    """,
    "bloom": """
        mlp.dense_4h_to_h mlp.dense_h_to_4h self_attention.dense self_attention.query_key_value
    """,
    "deepseek_v3": """
        down_proj gate_proj mlp.down_proj mlp.gate_proj mlp.up_proj self_attn.kv_a_proj_with_mqa
        self_attn.kv_b_proj self_attn.o_proj self_attn.q_a_proj self_attn.q_b_proj
        shared_experts.down_proj shared_experts.gate_proj shared_experts.up_proj up_proj
    """,
    "gpt_oss": """
        experts.down_proj experts.gate_up_proj self_attn.k_proj self_attn.o_proj
        self_attn.q_proj self_attn.v_proj
    """,
    "llama4": """
        experts.down_proj experts.gate_up_proj self_attn.k_proj self_attn.o_proj
        self_attn.q_proj self_attn.v_proj shared_expert.down_proj shared_expert.gate_proj
        shared_expert.up_proj
    """,
    "granitemoe": """
        block_sparse_moe.input_linear block_sparse_moe.output_linear self_attn.k_proj
        self_attn.o_proj self_attn.q_proj self_attn.v_proj
    """,
    "jetmoe": """
        experts.input_linear experts.output_linear mlp.input_linear mlp.output_linear
        self_attention.kv_proj
    """,
    "dbrx": """
        attn.Wqkv attn.out_proj mlp.v1 mlp.w1 mlp.w2
    """,
    "t5": """
        DenseReluDense.wi DenseReluDense.wo EncDecAttention.k EncDecAttention.o
        EncDecAttention.q EncDecAttention.v SelfAttention.k SelfAttention.o SelfAttention.q
        SelfAttention.v
    """,
    "bart": """
        encoder_attn.k_proj encoder_attn.out_proj encoder_attn.q_proj encoder_attn.v_proj fc1
        fc2 self_attn.k_proj self_attn.out_proj self_attn.q_proj self_attn.v_proj
    """,
    "whisper": """
        encoder.conv1 encoder.conv2 encoder_attn.k_proj encoder_attn.out_proj
        encoder_attn.q_proj encoder_attn.v_proj fc1 fc2 self_attn.k_proj self_attn.out_proj
        self_attn.q_proj self_attn.v_proj
    """,
    "wav2vec2": """
        attention.k_proj attention.out_proj attention.q_proj attention.v_proj conv
        feature_projection.projection feed_forward.intermediate_dense feed_forward.output_dense
    """,
    "vit": """
        attention.key attention.query attention.value intermediate.dense output.dense
    """,
    "swin": """
        downsample.reduction intermediate.dense output.dense self.key self.query self.value
    """,
    "clip": """
        mlp.fc1 mlp.fc2 self_attn.k_proj self_attn.out_proj self_attn.q_proj self_attn.v_proj
        text_projection visual_projection
    """,
    "siglip": """
        mlp.fc1 mlp.fc2 self_attn.k_proj self_attn.out_proj self_attn.q_proj self_attn.v_proj
    """,
    "convnext": """
        downsampling_layer pwconv1 pwconv2
    """,
    "resnet": """
        convolution shortcut.convolution
    """,
    "mamba": """
        mixer.in_proj mixer.out_proj mixer.x_proj
    """,
    "mamba2": """
        mixer.in_proj mixer.out_proj
    """,
    "rwkv": """
        attention.key attention.output attention.receptance attention.value feed_forward.key
        feed_forward.receptance feed_forward.value
    """,
    "xlnet": """
        ff.layer_1 ff.layer_2 rel_attn.k rel_attn.o rel_attn.q rel_attn.r rel_attn.v
    """,
    "recurrent_gemma": """
        mlp_block.down_proj mlp_block.gate_proj mlp_block.up_proj rg_lru.input_gate_weight
        rg_lru.recurrent_gate_weight temporal_block.linear_out temporal_block.linear_x
        temporal_block.linear_y
    """,
}
# Kinds of which some tensors are pruned and others kept: those of the head, say.
BOTH = {"wav2vec2": {"conv"}, "siglip": {"mlp.fc1", "mlp.fc2"}}
