"""Load a mixture of experts onto ranks and prune it: the memory of both together.

Its files have a tensor for each matrix of each expert, and the model one for all experts of a
layer. FSDP2 splits that between experts; transformers has no tensor-parallel plan that is known
here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import loaded_pruning
import torch
from measuring import Options, Table

NUM_RANKS = 2
# Layers of 151 million parameters, of which each expert has 18 million.
NUM_LAYERS, NUM_EXPERTS = 3, 8


def tables(options: Options) -> Iterator[Table]:
    table = loaded_pruning.empty_table(NUM_RANKS)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as tiny:
        write_model(folder, options.quick)
        write_model(tiny, is_quick=True)
        cases = [loaded_pruning.EXPERTS]
        loaded_pruning.add_rows(table, folder, tiny, "fsdp2", "bfloat16", NUM_RANKS, cases)
    yield table


def write_model(folder: str, is_quick: bool) -> None:
    import transformers

    torch.manual_seed(0)
    width = 64 if is_quick else 1408
    config = transformers.MixtralConfig(
        vocab_size=500 if is_quick else 32000,
        hidden_size=width,
        intermediate_size=width * 3,
        num_hidden_layers=2 if is_quick else NUM_LAYERS,
        num_local_experts=NUM_EXPERTS,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=width // 16,
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    state = {name: torch.randn(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    model.save_pretrained(folder, state_dict=state, max_shard_size="500MB")
