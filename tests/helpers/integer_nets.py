"""Models whose activations are small integers, so that sums over them are exact in any order."""

import torch

from helpers.criteria_cases import ReluNet


@torch.no_grad()
def integer_net(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, largest: int = 1
) -> ReluNet:
    """A ReluNet with weights between -largest and largest, the same at every call."""
    generator = torch.Generator().manual_seed(largest)
    net = ReluNet(sizes).to(dtype)
    for parameter in net.parameters():
        values = torch.randint(-largest, largest + 1, parameter.shape, generator=generator)
        parameter.copy_(values)
    net.l2.bias.zero_()  # under rowwise parallelism each rank adds a share of it
    return net
