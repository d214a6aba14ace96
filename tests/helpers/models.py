"""Small models with uneven and empty shards, and values that are hard to rank."""

import torch
from torch import Tensor, nn

DATA = ["normal", "rounded", "few", "equal", "zeros", "denormal", "inf"]
HARD = [*DATA, "one ulp apart", "wide"]  # to rank
DTYPES = ["float32", "float16", "bfloat16", "float64", "mixed"]

# Sizes of a Net: inputs, two hidden layers, outputs.
UNEVEN = (6, 10, 5, 3)
EVEN = (12, 24, 12, 5)  # columns that 1, 2, 3 and 4 ranks share evenly, for Shard(1)
EVEN_HIDDEN = (6, 12, 5, 3)  # TP ranks cannot run an uneven hidden layer


class Net(nn.Module):
    """Three linear layers; with 10, 5 and 3 rows no world size above 1 divides them all."""

    def __init__(self, sizes: tuple[int, int, int, int] = UNEVEN):
        super().__init__()
        self.l1 = nn.Linear(sizes[0], sizes[1])
        self.l2 = nn.Linear(sizes[1], sizes[2])
        self.l3 = nn.Linear(sizes[2], sizes[3])

    def forward(self, x: Tensor) -> Tensor:
        return self.l3(torch.tanh(self.l2(torch.relu(self.l1(x)))))


class ShapesNet(Net):
    """Net, and parameters of other shapes that no forward uses: 4-d, 1-d, and one element."""

    def __init__(self, sizes: tuple[int, int, int, int] = UNEVEN):
        super().__init__(sizes)
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.LayerNorm(7)
        self.one = nn.Linear(1, 1)


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill a model with random values that are the same on every rank."""
    return fill(model, "normal", "float32", seed)


@torch.no_grad()
def fill(model: nn.Module, data: str, dtype: str, seed: int = 0) -> nn.Module:
    """Fill every parameter with values of a kind of data. The dtype "mixed" differs by layer."""
    generator = torch.Generator().manual_seed(seed)
    mixed = [torch.bfloat16, torch.float32, torch.float16, torch.float64]
    for position, layer in enumerate(model.children()):
        layer.to(mixed[position % len(mixed)] if dtype == "mixed" else getattr(torch, dtype))
    for parameter in model.parameters():
        parameter.copy_(values(data, parameter.shape, parameter.dtype, generator))
    return model


def values(data: str, shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    chance = torch.rand(shape, generator=generator, dtype=torch.float64)
    steps = torch.randint(-3, 4, shape, generator=generator)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    match data:
        case "normal":
            chosen = normal
        case "rounded":
            chosen = (normal * 8).round() / 8
        case "few":
            chosen = steps / 2
        case "equal":
            chosen = torch.full(shape, 0.5).copysign(normal)
        case "zeros":
            chosen = torch.where(chance < 0.8, torch.zeros(shape).copysign(normal), normal)
        case "denormal":
            chosen = steps * smallest
        case "inf":
            chosen = torch.where(chance < 0.3, torch.full(shape, torch.inf), normal.abs())
            chosen = chosen.copysign(normal)
        case "one ulp apart":  # of float32
            chosen = torch.where(normal > 0, 1.0, 1.0 + 2.0**-23)
        case "wide":
            chosen = torch.exp(normal * 8)
        case _:
            raise ValueError(f"no such data: {data!r}")
    return chosen.to(dtype)


def fqns(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def target(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """("l1.weight") -> (model.l1, "weight")."""
    path, _, name = fqn.rpartition(".")
    return model.get_submodule(path), name
