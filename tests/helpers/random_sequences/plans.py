"""Plans: a small model, how it is sharded at first, and what happens to it.

They are plain data that prints. run.py carries them out.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from helpers import wrappings
from helpers.models import Net, ShapesNet

ROWS = 24  # of a batch of data: 1, 2, 3 and 4 ranks share them and halves of them evenly

NAMES = ["l2.weight", "l1.weight", "l1.bias", "l3.weight", "l3.bias"]
TIED_KINDS = ("plain", "ddp", "fsdp1_root", "fsdp2_root")  # one unit holds both names


class Recomputing(Net):
    """Net with activation checkpointing inside its forward, in both of torch's ways."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda t: torch.relu(self.l1(t)), x, use_reentrant=False)
        x = checkpoint(lambda t: torch.tanh(self.l2(t)), x, use_reentrant=True)
        return checkpoint(self.l3, x, use_reentrant=False)


class NormNet(Net):
    """Net with a normalisation in the middle; its parameters have one dimension."""

    def __init__(self, sizes: tuple[int, int, int, int]):
        super().__init__(sizes)
        self.norm = nn.LayerNorm(sizes[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(torch.tanh(self.norm(self.l2(torch.relu(self.l1(x))))))


class Scale(nn.Module):
    """Its parameters have no dimension."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.tensor(1.0)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + self.bias


class ScaleNet(Net):
    def __init__(self, sizes: tuple[int, int, int, int]):
        super().__init__(sizes)
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x))


class ConvNet(nn.Module):
    """A convolution of 5 channels, a normalisation and a linear layer."""

    def __init__(self, sizes: tuple[int, int, int, int]):
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 2)
        self.norm = nn.LayerNorm(20)
        self.head = nn.Linear(20, sizes[3])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.relu(self.conv(x)).flatten(1)))


class ChannelsLast(ConvNet):
    """Its convolution lies in memory in another order than the row-major one."""

    def __init__(self, sizes: tuple[int, int, int, int]):
        super().__init__(sizes)
        self.conv.to(memory_format=torch.channels_last)


class TiedNet(nn.Module):
    """Input and output embedding share one weight."""

    def __init__(self, sizes: tuple[int, int, int, int]):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(2, 12, 5))  # [experts, in, out]


class GroupsNet(Net):
    """Net, and weights whose inputs lie along other dimensions; no forward uses these."""

    def __init__(self, sizes: tuple[int, int, int, int]):
        super().__init__(sizes)
        self.conv = nn.Conv2d(12, 3, 2)
        self.turned = nn.ConvTranspose2d(12, 3, 2)
        self.experts = Experts()


FAMILIES = {
    "net": Net, "norm": NormNet, "conv": ConvNet, "tied": TiedNet, "shapes": ShapesNet,
    "groups": GroupsNet, "scale": ScaleNet, "channels last": ChannelsLast,
}  # fmt: skip
# Where an output sums over others than the last dimensions.
INPUTS = {"conv.weight": (1, 2, 3), "turned.weight": (0, 2, 3), "experts.gate_up": (1,)}


@dataclass(frozen=True)
class Operation:
    """The name of a method of operations.Run, and its arguments."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"


def do(operation: str, look: bool = False, /, **arguments: Any) -> Operation:
    """An operation; ``look``: a forward and verify follow it."""
    return Operation(operation, {**arguments, "look": look})


def global_l1(
    amount: Any, names: Any = NAMES, scores: Any = None, look: bool = False, **options: Any
) -> Operation:
    given = {"names": names, "scores": scores, "amount": amount}
    return do("global_l1", look, **given, **options)


@dataclass(frozen=True)
class Plan:
    """A sequence: the initial model and sharding, and the operations.

    Attributes:
        recompute: activation checkpointing of a Net: "", "inside" forward, or by a "wrapper".
        compiler: backend for torch.compile; "" for none.
        options: for the wrapper.
    """

    seed: int
    family: str
    sizes: tuple[int, int, int, int]
    dtype: str
    data: str
    wrapping: str
    optimizer: str
    operations: tuple[Operation, ...]
    recompute: str = ""
    compiler: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        start = f"{self.family} {self.sizes} {self.dtype} {self.data}, {self.wrapping}"
        lines = [f"seed {self.seed}: {start}, {self.optimizer}"]
        return "\n".join([*lines, *(f"  {i}. {op}" for i, op in enumerate(self.operations))])

    def make(self) -> nn.Module:
        return FAMILIES[self.family](self.sizes)

    def wrap(self, model: nn.Module, wrapping: str) -> nn.Module:
        if self.recompute == "inside":
            model.__class__ = Recomputing
        if self.recompute == "wrapper":
            model.l1, model.l3 = checkpoint_wrapper(model.l1), checkpoint_wrapper(model.l3)
        return wrappings.wrap(model, wrapping, **self.options)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        if self.family == "tied":
            x = torch.randint(0, 7, (ROWS, 3), generator=generator)
            return x, torch.randn(ROWS, 3, 7, generator=generator).to(dtype)
        shape = (2, 3, 3) if self.family in ("conv", "channels last") else (self.sizes[0],)
        x = torch.randn(ROWS, *shape, generator=generator)
        return x.to(dtype), torch.randn(ROWS, self.sizes[3], generator=generator).to(dtype)
