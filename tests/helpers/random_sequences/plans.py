"""Plans of random sequences of operations: functions of the seed alone.

A plan names a small model, how it is sharded at first, and what happens to it, as plain data
that prints. run.py carries it out.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from helpers import wrappings
from helpers.models import EVEN, EVEN_HIDDEN, UNEVEN, Net, ShapesNet, fqns

BATCH = 25  # seeds in a row that share a world size, and a process group
WORLD_SIZES = (2, 3, 1, 2, 3)
ROWS = 12  # of a batch of data: 1, 2 and 3 ranks share them evenly
DATA = ["normal", "normal", "rounded", "few", "equal", "zeros", "denormal"]

_UNEVEN_SIZES = [UNEVEN, (5, 7, 4, 3), (3, 4, 2, 1), (7, 1, 3, 2)]
_EVEN_SIZES = [EVEN_HIDDEN, EVEN]
_WRAPPINGS = {
    1: ["plain-1", "ddp-1", "fsdp2-1", "fsdp2_root-1", "hsdp-1x1", "tp-1", "fsdp2_tp-1x1"],
    2: [
        *["plain-2", "ddp-2", "fsdp1-2", "fsdp1_root-2", "fsdp1_flat-2", "fsdp2-2", "fsdp2_root-2"],
        *["fsdp2_dim1-2", "hsdp-1x2", "hsdp-2x1", "tp-2", "fsdp2_tp-1x2", "fsdp2_tp-2x1"],
    ],
    3: [
        *["plain-3", "ddp-3", "fsdp1-3", "fsdp1_root-3", "fsdp1_flat-3", "fsdp2-3", "fsdp2_root-3"],
        *["fsdp2_dim1-3", "hsdp-1x3", "hsdp-3x1", "tp-3", "fsdp2_tp-1x3", "fsdp2_tp-3x1"],
    ],
}
TIED_KINDS = ("plain", "ddp", "fsdp1_root", "fsdp2_root")  # one unit holds both names
_TP_KINDS = ("tp", "fsdp2_tp")


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
    "groups": GroupsNet, "scale": ScaleNet,
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


@dataclass(frozen=True)
class Plan:
    """A sequence: the initial model and sharding, and the operations."""

    seed: int
    family: str
    sizes: tuple[int, int, int, int]
    dtype: str
    data: str
    wrapping: str
    optimizer: str
    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        start = f"{self.family} {self.sizes} {self.dtype} {self.data}, {self.wrapping}"
        lines = [f"seed {self.seed}: {start}, {self.optimizer}"]
        return "\n".join([*lines, *(f"  {i}. {op}" for i, op in enumerate(self.operations))])

    def make(self) -> nn.Module:
        return FAMILIES[self.family](self.sizes)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        if self.family == "tied":
            x = torch.randint(0, 7, (ROWS, 3), generator=generator)
            return x, torch.randn(ROWS, 3, 7, generator=generator).to(dtype)
        shape = (2, 3, 3) if self.family == "conv" else (self.sizes[0],)
        x = torch.randn(ROWS, *shape, generator=generator)
        return x.to(dtype), torch.randn(ROWS, self.sizes[3], generator=generator).to(dtype)


def world_size_of(seed: int) -> int:
    """Return the world size of a seed; the seeds of a batch share it."""
    return WORLD_SIZES[seed // BATCH % len(WORLD_SIZES)]


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    return _Drawing(seed).plan()


class _Drawing:
    def __init__(self, seed: int):
        self.seed = seed
        self.random = random.Random(seed)
        self.family = self.random.choice(["net", "net", "norm", "norm", "conv", "tied"])
        if seed % 12 == 0:
            self.family = "scale"
        can_tp = self.family in ("net", "norm") and self.random.random() < 0.5
        self.sizes = self.random.choice(_EVEN_SIZES if can_tp else _UNEVEN_SIZES)
        self.dtype = self.random.choice(["float32", "float32", "bfloat16", "float64"])
        model = FAMILIES[self.family](self.sizes)
        self.names = fqns(model)
        self.numel = {name: p.numel() for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        # Plain modules prune a tied parameter under the given name, as torch does; FSDP under all.
        self.single = [n for n in self.names if (self.family, n) != ("tied", "embedding.weight")]
        self.matrices = [name for name in self.single if len(self.shapes[name]) > 1]

    def plan(self) -> Plan:
        wrapping = self.wrapping()
        number = self.random.randint(4, 12)
        return Plan(
            self.seed, self.family, self.sizes, self.dtype, self.random.choice(DATA), wrapping,
            self.random.choice(["adamw", "sgd"]), tuple(self.operation() for _ in range(number)),
        )  # fmt: skip

    def operation(self) -> Operation:
        weights = [weight for weight, _ in _OPERATIONS.values()]
        (name,) = self.random.choices(list(_OPERATIONS), weights)
        # A forward afterwards leaves gathered tensors behind for the next operation.
        return Operation(name, {**_OPERATIONS[name][1](self), "look": self.chance(0.5)})

    def wrapping(self) -> str:
        return self.random.choice([w for w in _WRAPPINGS[world_size_of(self.seed)] if self.fits(w)])

    def fits(self, wrapping: str) -> bool:
        kind = wrappings.kind_of(wrapping)
        if self.family == "tied":
            return kind in TIED_KINDS
        if self.family == "scale":  # FSDP refuses parameters of no dimension
            return kind in ("plain", "ddp")
        if kind in _TP_KINDS:
            return self.sizes in _EVEN_SIZES
        return kind != "fsdp2_dim1" or self.sizes == EVEN

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def number(self) -> int:
        return self.random.randrange(2**31)

    def amount(self, largest: int) -> int | float:
        if self.random.random() < 0.3:
            return self.random.randint(0, largest)
        return self.random.choice([0.0, 1.0, 0.5, *(round(self.random.random(), 3),) * 5])

    def some(self, names: list[str], least: int = 1) -> list[str]:
        return self.random.sample(names, self.random.randint(min(least, len(names)), len(names)))

    def scores(self, names: list[str]) -> dict[str, Any] | None:
        if self.random.random() < 0.6:
            return None
        data = self.random.choice(["normal", "few", "equal", "rounded"])
        dtype = self.random.choice([self.dtype, "float32"])
        return {"names": self.some(names), "data": data, "dtype": dtype, "seed": self.number()}

    def bound(self, names: list[str], least: float, most: float) -> float | dict[str, float] | None:
        kind = self.random.random()
        if kind < 0.7:
            return None
        if kind < 0.8:
            return round(self.random.uniform(least, most), 2)
        return {n: round(self.random.uniform(least, most), 2) for n in self.some(names)}

    def ranked(self) -> dict[str, Any]:
        """Parameters, in an order of the caller's or of select, an amount and bounds."""
        names = self.some(self.names)
        return {
            "names": names,
            "select": self.chance(0.5),
            "amount": self.amount(sum(self.numel[name] for name in names) // 2),
            "low": self.bound(names, 0.0, 0.4),
            "high": self.bound(names, 0.6, 1.0),
        }

    def of_one(self) -> dict[str, Any]:
        name = self.random.choice(self.single)
        return {"name": name, "amount": self.amount(self.numel[name] // 2)}

    def channels(self) -> dict[str, Any]:
        name = self.random.choice(self.matrices)
        shape = self.shapes[name]
        dim = self.random.randrange(-len(shape), len(shape))
        return {"name": name, "amount": self.amount(shape[dim] // 2), "dim": dim}

    def scored(self, drawn: dict[str, Any]) -> dict[str, Any]:
        return {**drawn, "scores": self.scores(drawn.get("names") or [drawn["name"]])}

    def seeded(self, **drawn: Any) -> dict[str, Any]:
        return {**drawn, "seed": self.number()}

    def own_method(self) -> dict[str, Any]:
        by_limit = self.chance(0.5)
        limit = round(self.random.random(), 2) if by_limit else None
        amount = None if by_limit else self.amount(10)
        return {"names": self.some(self.single), "limit": limit, "amount": amount}

    def global_mask(self) -> dict[str, Any]:
        names = self.some(self.single)
        k = self.random.randint(0, sum(self.numel[name] for name in names) // 2)
        share = self.random.choice([None, 0.8])
        return self.seeded(names=names, k=k, largest=self.chance(0.7), share=share)

    def load_rewrapped(self) -> dict[str, Any]:
        """Load into a fresh model, in which some parameters may be pruned already."""
        pruned = self.some(self.single) if self.chance(0.4) else []
        unmasked = self.random.choice(["error", "keep"])
        return self.seeded(wrapping=self.wrapping(), pruned=pruned, unmasked=unmasked)


def _nothing(_: _Drawing) -> dict[str, Any]:
    return {}


# By operation: how often it comes, and its arguments.
_OPERATIONS: dict[str, tuple[int, Callable[[_Drawing], dict[str, Any]]]] = {
    "global_l1": (7, lambda d: d.scored(d.ranked())),
    "global_random": (2, lambda d: d.seeded(**d.ranked())),
    "single_l1": (2, lambda d: d.scored(d.of_one())),
    "single_random": (2, lambda d: d.seeded(**d.of_one())),
    "norm_channels": (2, lambda d: {**d.scored(d.channels()), "n": d.pick(1, 2, 2, float("inf"))}),
    "random_channels": (1, lambda d: d.seeded(**d.channels())),
    "custom": (
        2,
        lambda d: d.seeded(
            name=d.pick(*d.single),
            share=d.pick(0.0, 0.3, 0.8, 1.0),
            dtype=d.pick("bool", "float32", "int64", d.dtype),
        ),
    ),
    "identity": (1, lambda d: {"name": d.pick(*d.single)}),
    "segments": (
        2,
        lambda d: {
            "names": d.some(d.names),
            "scope": d.pick("layer", "row"),
            "amount": d.pick(0.0, 0.25, 0.5, 0.8, 1.0),
        },
    ),
    "pattern": (1, lambda d: {"pattern": d.pick("1:2", "2:3", "2:4", "1:5")}),
    "own_method": (2, _Drawing.own_method),
    "global_mask": (1, _Drawing.global_mask),
    "set_masks": (
        2,
        lambda d: d.seeded(
            names=d.some(d.single), share=d.pick(0.2, 0.5, 0.9), with_optimizer=d.chance(0.5)
        ),
    ),
    "masks_from_zeros": (1, lambda d: {"names": d.some(d.single)}),
    "schedule": (3, _nothing),
    "remove": (2, lambda d: {"name": d.pick(*d.names)}),
    "remove_all": (1, _nothing),
    "train": (6, _Drawing.seeded),
    "evaluate": (1, lambda d: d.seeded(inference=d.chance(0.5))),
    "set_values": (2, lambda d: d.seeded(data=d.pick(*DATA))),
    "load_rewrapped": (2, _Drawing.load_rewrapped),
    "wrap_pruned": (2, lambda d: {"wrapping": d.wrapping()}),
    "state_dict": (1, _nothing),
    "copied": (1, _nothing),
    "new_optimizer": (1, _nothing),
}
