"""The default selection and the layouts of some forty families, as transformers saves them."""

import re

import pytest
import torch

from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.inspecting import inspect
from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.recipe import FileRecipe
from distprune.files.selecting.layouts import Layouts
from distprune.files.selecting.policy import select_tensors
from distprune.files.verifying import verify
from helpers import file_oracle
from helpers.tiny_checkpoints import load
from helpers.tiny_transformers import FAMILIES, save_tiny, tiny_model

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
KEPT = {
    "bert": """
        classifier embeddings.position_embeddings embeddings.token_type_embeddings
        embeddings.word_embeddings
    """,
    "bert_mlm": """
        cls.seq_relationship embeddings.position_embeddings embeddings.token_type_embeddings
        embeddings.word_embeddings transform.dense
    """,
    "roberta": """
        classifier.dense classifier.out_proj embeddings.position_embeddings
        embeddings.token_type_embeddings embeddings.word_embeddings
    """,
    "roberta_prelayernorm": """
        embeddings.position_embeddings embeddings.token_type_embeddings
        embeddings.word_embeddings lm_head.dense
    """,
    "distilbert": """
        classifier embeddings.position_embeddings embeddings.word_embeddings pre_classifier
    """,
    "electra": """
        discriminator_predictions.dense discriminator_predictions.dense_prediction
        electra.embeddings_project embeddings.position_embeddings
        embeddings.token_type_embeddings embeddings.word_embeddings
    """,
    "gpt2": """
        transformer.wpe transformer.wte
    """,
    "openai_gpt": """
        transformer.positions_embed transformer.tokens_embed
    """,
    "gpt_bigcode": """
        transformer.wpe transformer.wte
    """,
    "gpt_neox": """
        embed_out gpt_neox.embed_in
    """,
    "llama": """
        lm_head model.embed_tokens
    """,
    "llama_classifier": """
        model.embed_tokens score
    """,
    "mistral": """
        lm_head model.embed_tokens
    """,
    "mixtral": """
        block_sparse_moe.gate lm_head model.embed_tokens
    """,
    "qwen2": """
        lm_head model.embed_tokens
    """,
    "qwen2_moe": """
        lm_head mlp.gate mlp.shared_expert_gate model.embed_tokens
    """,
    "qwen3": """
        lm_head model.embed_tokens
    """,
    "qwen3_moe": """
        lm_head mlp.gate model.embed_tokens
    """,
    "gemma2": """
        model.embed_tokens
    """,
    "gemma3": """
        model.embed_tokens
    """,
    "phi3": """
        lm_head model.embed_tokens
    """,
    "falcon": """
        transformer.word_embeddings
    """,
    "bloom": """
        transformer.word_embeddings
    """,
    "deepseek_v3": """
        lm_head mlp.gate model.embed_tokens
    """,
    "gpt_oss": """
        experts.down_proj_bias experts.gate_up_proj_bias lm_head mlp.router model.embed_tokens
    """,
    "llama4": """
        feed_forward.router lm_head model.embed_tokens
    """,
    "granitemoe": """
        lm_head model.embed_tokens router.layer
    """,
    "jetmoe": """
        model.embed_tokens router.layer
    """,
    "dbrx": """
        lm_head router.layer transformer.wte
    """,
    "t5": """
        SelfAttention.relative_attention_bias shared
    """,
    "bart": """
        classification_head.dense classification_head.out_proj decoder.embed_positions
        encoder.embed_positions model.shared
    """,
    "whisper": """
        decoder.embed_positions decoder.embed_tokens encoder.embed_positions
    """,
    "wav2vec2": """
        conv lm_head weight.original0 weight.original1
    """,
    "vit": """
        classifier embeddings.cls_token embeddings.position_embeddings
        patch_embeddings.projection
    """,
    "swin": """
        classifier patch_embeddings.projection self.relative_position_bias_table
    """,
    "clip": """
        embeddings.patch_embedding embeddings.position_embedding embeddings.token_embedding
    """,
    "siglip": """
        attention.in_proj_weight attention.out_proj embeddings.patch_embedding
        embeddings.position_embedding embeddings.token_embedding head.probe mlp.fc1 mlp.fc2
        text_model.head
    """,
    "convnext": """
        classifier dwconv embeddings.patch_embeddings
    """,
    "resnet": """
        classifier embedder.convolution
    """,
    "mamba": """
        backbone.embeddings mixer.A_log mixer.conv1d mixer.dt_proj
    """,
    "mamba2": """
        backbone.embeddings lm_head mixer.conv1d
    """,
    "rwkv": """
        attention.time_mix_key attention.time_mix_receptance attention.time_mix_value
        feed_forward.time_mix_key feed_forward.time_mix_receptance head rwkv.embeddings
    """,
    "xlnet": """
        rel_attn.r_r_bias rel_attn.r_s_bias rel_attn.r_w_bias rel_attn.seg_embed
        transformer.mask_emb transformer.word_embedding
    """,
    "recurrent_gemma": """
        model.embed_tokens rg_lru.input_gate_bias rg_lru.recurrent_gate_bias
        temporal_block.conv_1d
    """,
}

# Tensors that are not [..., outputs, inputs]: how they become [outputs, inputs], and back.
TURNED = {
    "gpt2": (r".*\.(c_attn|c_proj|c_fc)\.weight", "in, out"),
    "openai_gpt": (r".*\.(c_attn|c_proj|c_fc)\.weight", "in, out"),
    "gpt_oss": (r".*\.experts\.(gate_up|down)_proj", "in, out"),
    "llama4": (r".*\.experts\.(gate_up|down)_proj", "in, out"),
    "dbrx": (r".*\.experts\.mlp\.w2", "experts of in, out"),
    "recurrent_gemma": (r".*_gate_weight", "in, out"),
    "xlnet": (r".*\.rel_attn\.[qkvr]", "in, out, out"),
}
OTHER_FORMS = {"xlnet": (r".*\.rel_attn\.o", "out, in, in")}
BY_ORACLE = [*TURNED, "granitemoe", "jetmoe", "gpt_bigcode", "qwen3_moe"]


def kind(name):
    parts = [part for part in name.removesuffix(".weight").split(".")[-2:] if not part.isdigit()]
    return ".".join(parts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints by family, made once."""
    folder, made = tmp_path_factory.mktemp("families"), {}

    def get(family):
        if family not in made:
            made[family] = save_tiny(family, folder / family)
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_pruned_by_default(saved, family):
    verdicts = select_tensors(open_checkpoint(saved(family)), FileRecipe(0.5))
    matrices = [verdict for verdict in verdicts if len(verdict.entry.shape) > 1]
    pruned = {kind(verdict.entry.name) for verdict in matrices if verdict.is_pruned}
    kept = {kind(verdict.entry.name) for verdict in matrices if not verdict.is_pruned}
    assert pruned == set(PRUNED[family].split())
    assert kept == set(KEPT[family].split())
    assert not any(verdict.is_pruned for verdict in verdicts if verdict not in matrices)


@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_are_those_of_the_modules(saved, family):
    """Of all modules that are stored under their own names."""
    from transformers.pytorch_utils import Conv1D

    checkpoint = open_checkpoint(saved(family))
    layouts, entries = Layouts(checkpoint), {entry.name: entry for entry in checkpoint.tensors}
    num_seen = 0
    for path, module in tiny_model(family).named_modules():
        entry = entries.get(f"{path}.weight")
        if entry is None or entry.shape != tuple(module.weight.shape):
            continue
        out, *rest = entry.shape
        if isinstance(module, torch.nn.Linear):
            expected = (out, module.in_features, 1, 1)
        elif isinstance(module, Conv1D):
            expected = (1, module.nx, module.nf, 1)
        elif isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d)):
            expected = (out, rest[0], 1, module.weight[0, 0].numel())
        else:
            continue
        found = layouts.of(entry)
        assert (found.outer, found.inputs, found.columns, found.kernel) == expected, path
        num_seen += 1
    assert num_seen or family in ("vit", "clip", "siglip")  # these are renamed


@pytest.mark.parametrize("way", [{"pattern": "2:4"}, {"sparsity": 0.4, "scope": "row"}])
@pytest.mark.parametrize("family", BY_ORACLE)
def test_prunes_along_the_inputs(saved, tmp_path, family, way):
    source = saved(family)
    made = plan(source, FileRecipe(**way))
    prune(made, tmp_path / "out")
    tensors = load(source)
    names = [tensor.entry.name for tensor in made.tensors]
    flat = {name: to_matrix(tensors[name], form_of(family, name)) for name in names}
    masks = file_oracle.masks(flat, names, **way)
    expected = {
        name: from_matrix(mask, tensors[name].shape, form_of(family, name))
        for name, mask in masks.items()
    }
    file_oracle.check(source, tmp_path / "out", expected, load)
    assert verify(tmp_path / "out", source).problems == ()
    if "pattern" in way:
        facts = list(inspect(open_checkpoint(tmp_path / "out"), only=set(names)))
        assert all(f.num_kept[2, 4] == f.num_groups[2, 4] == f.entry.numel // 4 for f in facts)
    if family in ("gpt2", "gpt_oss", "llama4"):
        model = type(tiny_model(family)).from_pretrained(tmp_path / "out")
        state = model.state_dict()
        assert all(torch.equal(state[name] == 0, ~expected[name]) for name in names)


def form_of(family, name):
    for table in (TURNED, OTHER_FORMS):
        pattern, form = table.get(family, ("", ""))
        if re.fullmatch(pattern, name):
            return form
    return "out, in"


def to_matrix(tensor, form):
    """[outputs, inputs]."""
    if form == "experts of in, out":
        return tensor.reshape(4, -1, tensor.shape[-1]).transpose(1, 2).flatten(0, 1)
    if form == "in, out, out":
        return tensor.flatten(1).T.contiguous()
    if form == "out, in, in":
        return tensor.flatten(1)
    return (tensor.transpose(-1, -2) if form == "in, out" else tensor).flatten(0, -2)


def from_matrix(mask, shape, form):
    if form == "experts of in, out":
        return mask.reshape(4, shape[1], -1).transpose(1, 2).reshape(shape)
    if form == "in, out, out":
        return mask.T.reshape(shape)
    if form == "in, out":
        return mask.reshape(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2).reshape(shape)
    return mask.reshape(shape)
