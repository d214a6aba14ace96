"""What several files here share."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import distprune


def prune(model: nn.Module, amount: float = 0.5) -> None:
    """Prune all weights of a model by magnitude."""
    parameters = distprune.select(model, everything=True)
    distprune.global_unstructured(parameters, distprune.L1Unstructured, amount=amount)


def whole(tensor: DTensor) -> Tensor:
    """A DTensor that all ranks share by rows, as a whole, on the device of the shards.

    ``full_tensor()`` ends in a segmentation fault where gloo has to gather CUDA tensors: see
    https://github.com/pytorch/pytorch/issues/152645
    """
    local = tensor.to_local()
    parts = [local] * dist.get_world_size()
    if len(parts) > 1:
        dist.all_gather_object(parts, local.cpu())
    return torch.cat(parts).to(local.device)
