"""A model with small integers for weights, data and gradients: all sums over it are exact.

So what a criterion reads on any sharding is, bit for bit, what one process reads that runs the
same batches, and masks are equal from end to end.
"""

import torch
from torch import Tensor, nn

import distprune as prune
from helpers import wrappings
from helpers.models import Net, target

WEIGHTS = ["l1.weight", "l2.weight", "l3.weight"]
ROWS = 12  # of a batch; 1, 2, 3 and 4 ranks share them evenly


class IntegerNet(Net):
    """Net without tanh: integers stay integers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(self.l2(torch.relu(self.l1(x))))


@torch.no_grad()
def integer_net(wrapping: str, seed: int = 0) -> IntegerNet:
    """Weights are -1, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    model = IntegerNet(wrappings.runnable_sizes(wrapping))
    for parameter in model.parameters():
        parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    model.l2.bias.mul_(12)  # RowwiseParallel adds a share of it on every rank
    return model


def batches(model: nn.Module, number: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """(inputs, factors of the outputs) of some global batches, small integers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = model.l1.in_features, model.l3.out_features
    return [
        tuple(torch.randint(-2, 3, (ROWS, size), generator=generator).float() for size in sizes)
        for _ in range(number)
    ]


def loss(model: nn.Module, x: Tensor, factors: Tensor) -> Tensor:
    """A sum over rows: its gradient is a sum of integers."""
    return (model(x) * factors).sum()


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], part: int, num_parts: int) -> None:
    """This rank's share of a batch. Times the number of ranks, because wrappers average."""
    x, factors = (tensor.chunk(num_parts)[part] for tensor in batch)
    (loss(model, x, factors) * num_parts).backward()


def targets(model: nn.Module, names: list[str]) -> list[tuple[nn.Module, str]]:
    return [target(wrappings.unwrapped(model), name) for name in names]


def named_targets(model: nn.Module, names: list[str]) -> list[prune.NamedParameter]:
    pairs = zip(targets(model, names), names, strict=True)
    return [prune.NamedParameter(*pair, name) for pair, name in pairs]
