"""LoRA on the pruned model: adapters on every linear layer, whose deltas leave the zeros zero."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distprune.integrations.peft import hold_zeros


def add_adapters(model: nn.Module, rank: int, seed: int) -> PeftModel:
    """Adapters of the same first values on every rank; the base is frozen. Collective.

    Args:
        model: pruned; plain, or sharded by FSDP2. Its wrapper does not know of adapters that come
            later: each rank has them whole, and `recover` averages their gradients.
    """
    base = model.module if isinstance(model, DistributedDataParallel) else model
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    adapted = get_peft_model(base, config)
    hold_zeros(adapted)
    return adapted
