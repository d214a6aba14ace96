"""Small checkpoints of some architectures, in the layouts that users have on disk.

transformers' own classes make and save them, so names, dtypes, shapes, ties and stored layouts are
those of real checkpoints; only the sizes are small. :data:`ARCHITECTURES` lists all of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Architecture:
    """A model of a small size, and how it is saved.

    Attributes:
        name: of the test.
        model: name of its class in transformers.
        sizes: arguments of the configuration.
        dtype: of its weights; "mixed" keeps one-dimensional ones in float32.
        max_shard_size: of ``save_pretrained``; small ones lead to many files and an index.
        input_first: an expression for names of tensors that are stored [..., in, out].
        not_by_four: patterns of tensors whose number of inputs 4 does not divide.
        layout: changes the folder after saving: other files, links.
    """

    name: str
    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    max_shard_size: str = "1GB"
    input_first: str | None = None
    not_by_four: tuple[str, ...] = ()
    layout: Callable[[Path], Path] = lambda folder: folder

    def make(self, folder: Path) -> Path:
        """Save the checkpoint and return the folder that a user would name."""
        model = self.model_of_its_class()
        with torch.no_grad():
            for parameter in model.parameters():
                # Coarse values, so that many scores are equal.
                parameter.copy_(torch.randn_like(parameter.float()).mul_(16).round_().div_(64))
        self._cast(model)
        model.save_pretrained(folder, max_shard_size=self.max_shard_size)
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# A model\n\nWords.\n")
        return self.layout(folder)

    def model_of_its_class(self) -> Any:
        """Make the model, with transformers' initial values."""
        import transformers

        torch.manual_seed(len(self.name))
        kind = getattr(transformers, self.model)
        return kind(kind.config_class(**self.sizes))

    def _cast(self, model: torch.nn.Module) -> None:
        if self.dtype == "mixed":
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data = parameter.data.to(torch.bfloat16)
        else:
            model.to(getattr(torch, self.dtype))

    def stores_input_first(self, name: str) -> bool:
        """Whether a tensor's inputs come before its outputs."""
        return self.input_first is not None and bool(re.fullmatch(self.input_first, name))


def in_the_cache(folder: Path) -> Path:
    """Move the files as huggingface_hub does: a snapshot of links into a folder of blobs."""
    root = folder.with_name("models--org--" + folder.name)
    snapshot = root / "snapshots" / "0123abcd"
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    for number, path in enumerate(sorted(folder.rglob("*"))):
        if path.is_file():
            blob = root / "blobs" / f"{number:040x}"
            shutil.move(path, blob)
            link = snapshot / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    shutil.rmtree(folder)
    return snapshot


def with_duplicates(folder: Path) -> Path:
    """Add the same weights in other formats, as many repositories have them."""
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4 the same weights")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"PK\3\4 the same weights")
    (folder / "original" / "params.json").write_text("{}")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"\x08\x07")
    return folder


def with_adapter(folder: Path) -> Path:
    """Add an adapter of peft, which transformers loads with the model if peft is installed."""
    from helpers.tiny_checkpoints import file_bytes

    layers = [f"base_model.model.model.layers.{i}.self_attn.q_proj" for i in range(2)]
    weights = {f"{layer}.lora_A.weight": torch.ones(2, 32) for layer in layers}
    weights |= {f"{layer}.lora_B.weight": torch.ones(32, 2) for layer in layers}
    (folder / "adapter_model.safetensors").write_bytes(file_bytes(weights))
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def with_dense_module(folder: Path) -> Path:
    """Add folders of modules with their own weights, as sentence-transformers does."""
    from helpers.tiny_checkpoints import file_bytes

    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Dense": "Dense"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    weights = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    for name in ("2_Dense", "3_Dense"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"in_features": 32, "out_features": 8}')
    (folder / "2_Dense" / "model.safetensors").write_bytes(file_bytes(weights))
    torch.save(weights, folder / "3_Dense" / "pytorch_model.bin")
    return folder


def with_code(folder: Path) -> Path:
    """Add modelling code, a tokenizer in a folder, and a link inside the folder."""
    (folder / "modeling_custom.py").write_text("class Model: ...\n")
    (folder / "vocab").mkdir()
    (folder / "vocab" / "merges.txt").write_text("a b\n")
    (folder / "merges.txt").symlink_to("vocab/merges.txt")
    return folder


_DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_ENCODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32,
}  # fmt: skip

ARCHITECTURES = (
    Architecture("llama_in_the_cache", "LlamaForCausalLM", {**_DECODER, "num_hidden_layers": 11},
                 max_shard_size="60KB", layout=in_the_cache),
    Architecture("llama_tied_with_duplicates", "LlamaForCausalLM",
                 {**_DECODER, "tie_word_embeddings": True}, "float16", layout=with_duplicates),
    Architecture("mistral_with_adapter", "MistralForCausalLM", _DECODER, "mixed",
                 layout=with_adapter),
    Architecture("qwen2", "Qwen2ForCausalLM", _DECODER, max_shard_size="20KB", layout=with_code),
    Architecture("qwen3_moe", "Qwen3MoeForCausalLM", {**_DECODER, "moe_intermediate_size": 16,
                 "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    Architecture("mixtral", "MixtralForCausalLM", {**_DECODER, "num_local_experts": 4}, "float16",
                 max_shard_size="40KB"),
    Architecture("gpt_oss", "GptOssForCausalLM", {**_DECODER, "num_local_experts": 4,
                 "head_dim": 8, "intermediate_size": 40},
                 input_first=r".*experts\.(gate_up|down)_proj"),
    Architecture("gpt2", "GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2,
                 "n_head": 4, "n_positions": 32}, "float32",
                 input_first=r".*\.(c_attn|c_proj|c_fc)\.weight"),
    Architecture("mamba", "MambaForCausalLM", {"vocab_size": 64, "hidden_size": 32,
                 "num_hidden_layers": 2, "time_step_rank": 4}, "float32",
                 not_by_four=("*.conv1d.weight",)),
    Architecture("bert_classifier", "BertForSequenceClassification",
                 {**_ENCODER, "num_labels": 3}, "float32"),
    Architecture("sentence_transformer", "BertModel", _ENCODER, "float32",
                 layout=with_dense_module),
    Architecture("wav2vec2", "Wav2Vec2ForCTC", {**_ENCODER, "conv_dim": [32, 32],
                 "conv_kernel": [4, 2], "conv_stride": [2, 2], "num_feat_extract_layers": 2,
                 "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
                 "feat_extract_norm": "layer"}, "float32",
                 not_by_four=("wav2vec2.feature_extractor.conv_layers.0.conv.weight",)),
)  # fmt: skip
