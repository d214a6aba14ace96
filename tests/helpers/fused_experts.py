"""Nets whose activations are small integers; and fused experts as transformers has them."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.micro_batches import ReluNet

# How a module multiplies: see FusedExperts.multiply.
IMPLEMENTATIONS = ("eager", "grouped_mm")
SIZES = (4, 8, 8)  # experts, features, width: rows of 16 bytes also in bf16, as grouped_mm needs


class FusedExperts(nn.Module):
    """Gated experts in two parameters; they say ``is_transposed`` as transformers' do."""

    def __init__(self, sizes=SIZES, is_transposed=False, implementation="eager"):
        super().__init__()
        experts, features, width = sizes
        self.is_transposed, self.implementation = is_transposed, implementation
        up, down = (experts, 2 * width, features), (experts, features, width)
        if is_transposed:
            up, down = ((first, last, middle) for first, middle, last in (up, down))
        self.gate_up_proj = nn.Parameter(torch.zeros(up))
        self.down_proj = nn.Parameter(torch.zeros(down))

    def forward(self, hidden: Tensor, experts: Tensor) -> Tensor:
        """Args: hidden [tokens, features]; experts [tokens, k], to which each token goes."""
        out = torch.zeros_like(hidden)
        if self.implementation == "eager":
            for expert in experts.unique():
                token, _ = torch.where(experts == expert)
                gate, up = self.multiply(hidden[token], "gate_up_proj", expert).chunk(2, -1)
                out.index_add_(0, token, self.multiply(gated(gate, up), "down_proj", expert))
            return out
        order = experts.reshape(-1).argsort(stable=True)
        token = order // experts.shape[1]
        counts = torch.bincount(experts.reshape(-1), minlength=len(self.down_proj))
        offsets = counts.cumsum(0, dtype=torch.int32)
        gate, up = self.grouped(hidden[token], "gate_up_proj", offsets).chunk(2, -1)
        return out.index_add_(0, token, self.grouped(gated(gate, up), "down_proj", offsets))

    def multiply(self, rows: Tensor, name: str, expert: Tensor) -> Tensor:
        matrix = getattr(self, name)[expert]
        return rows @ matrix if self.is_transposed else functional.linear(rows, matrix)

    def grouped(self, rows: Tensor, name: str, offsets: Tensor) -> Tensor:
        weight = getattr(self, name)
        weight = weight if self.is_transposed else weight.transpose(-2, -1)
        return grouped_mm(rows, weight, offsets)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Small integers of small integers."""
    return torch.relu(gate) * up % 3


def grouped_mm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return functional.grouped_mm(rows, weight, offs=offsets)


class ExpertsNet(nn.Module):
    """A linear layer, and experts of both layouts, to which tokens go by what they are.

    No token goes to the last expert of ``second``.
    """

    def __init__(self, implementation="eager", sizes=SIZES):
        super().__init__()
        self.l1 = nn.Linear(sizes[1], sizes[1])
        self.first = FusedExperts(sizes, False, implementation)
        self.second = FusedExperts(sizes, True, implementation)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.l1(x)) % 3
        x = self.first(x, routed(x, len(self.first.down_proj))) % 3
        return self.second(x, routed(x, len(self.second.down_proj) - 1))


def routed(x: Tensor, num_experts: int) -> Tensor:
    """Two experts for each token, which depend on nothing but the token."""
    one = x.abs().sum(-1).long() % num_experts
    return torch.stack([one, (one + 1 + x[:, 0].abs().long() % (num_experts - 1)) % num_experts], 1)


@torch.no_grad()
def experts_net(implementation="eager", dtype=torch.float32, sizes=SIZES) -> ExpertsNet:
    """An ExpertsNet whose activations are small integers, the same at every call."""
    net = ExpertsNet(implementation, sizes).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return net


def tokens_of(part: int, num_features: int = SIZES[1], dtype=torch.float32) -> Tensor:
    """Tokens of one data-parallel rank: of another number on each, and small integers."""
    generator = torch.Generator().manual_seed(part)
    return torch.randint(-2, 3, (3 + 4 * part, num_features), generator=generator).to(dtype)


@torch.no_grad()
def expected(net: ExpertsNet, parts: list[Tensor]) -> dict[str, tuple]:
    """(tokens by expert, sums, sums of squares) of each fused parameter: token by token."""
    seen: dict[str, list[list[Tensor]]] = {}
    x = torch.relu(net.l1(torch.cat(parts))) % 3
    for name in ("first", "second"):
        experts = net.get_submodule(name)
        num_experts, out = len(experts.down_proj), torch.zeros_like(x)
        rows = {which: [[] for _ in range(num_experts)] for which in ("gate_up_proj", "down_proj")}
        where = routed(x, num_experts - (name == "second"))
        for number, token in enumerate(x):
            for expert in where[number].tolist():
                up, down = (
                    matrix.T if experts.is_transposed else matrix
                    for matrix in (experts.gate_up_proj[expert], experts.down_proj[expert])
                )
                gate, value = (up @ token).chunk(2)
                inner = gated(gate, value)
                rows["gate_up_proj"][expert].append(token)
                rows["down_proj"][expert].append(inner)
                out[number] += down @ inner
        seen |= {f"{name}.{which}": of_all for which, of_all in rows.items()}
        x = out % 3
    found = {}
    for name, of_all in seen.items():
        size = max((len(row) for rows in of_all for row in rows), default=0)
        stacks = [torch.stack(r).double() if r else torch.zeros(0, size).double() for r in of_all]
        found[name] = (
            tuple(map(len, of_all)),
            torch.stack([stack.sum(0) for stack in stacks]),
            torch.stack([stack.square().sum(0) for stack in stacks]),
        )
    return found


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
