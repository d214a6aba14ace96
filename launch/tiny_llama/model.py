"""A small Llama, spread over the ranks in one of three ways, and its way back to one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from .data import WINDOW


def build_model() -> LlamaForCausalLM:
    """A decoder of 0.9 million parameters that reads bytes; plain, on the CPU."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,  # tensor parallelism gives each rank whole heads
            num_key_value_heads=4,
            max_position_embeddings=WINDOW,
            tie_word_embeddings=False,
            bos_token_id=None,  # every token is a byte of text, none is special
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def wrap_model(
    model: LlamaForCausalLM, wrap: str, device: torch.device, num_ranks: int
) -> nn.Module:
    """Spread the model over all ranks.

    Args:
        model: plain, with the same weights on every rank.
        wrap: "ddp" copies it to every rank; "fsdp2" gives each rank a slice of every
            weight; "tp" gives each rank some heads and some of the MLP's units.
    """
    model = model.to(device)
    if wrap == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (num_ranks,))
    if wrap == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if wrap == "tp":
        _check_divisible(model.config, num_ranks)
        projections = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        projections |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        projections |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer, mesh, projections)
        return model
    raise ValueError(f"wrap={wrap!r} is unknown; expected 'ddp', 'fsdp2' or 'tp'.")


def wrapped_copy(
    state: dict[str, Tensor], wrap: str, device: torch.device, num_ranks: int
) -> nn.Module:
    """A fresh wrapped model with the weights of `state`, which only rank 0 needs to hold."""
    model = wrap_model(build_model(), wrap, device, num_ranks)
    # It renames keys in the dict it is given, hence a copy.
    set_model_state_dict(
        model,
        dict(state),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    return model


def consolidated_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict on rank 0, empty elsewhere. Collective.

    Its tensors are plain and on the CPU, its names have no wrapper prefixes.
    """
    return get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def _check_divisible(config: LlamaConfig, num_ranks: int) -> None:
    if config.num_key_value_heads % num_ranks or config.intermediate_size % num_ranks:
        raise ValueError(
            f"{config.num_key_value_heads} heads and {config.intermediate_size} MLP units cannot "
            f"be split evenly over {num_ranks} ranks; use 1, 2 or 4 ranks with --wrap tp."
        )
