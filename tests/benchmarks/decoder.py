"""A small decoder to train, and the ways to run it on ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# How a model is run, and whether the bounds are for it.
WAYS = {
    "FSDP2": True,
    "FSDP2, fused AdamW": False,
    "FSDP2, bf16 policy, fused AdamW": False,
    "FSDP1": False,
    "TP": False,
    "one process": False,
}


@dataclass(frozen=True)
class Sizes:
    """Of a decoder and its batch: ``sequences`` of ``length`` tokens on each rank."""

    width: int = 512
    num_blocks: int = 4
    head: int = 64
    vocabulary: int = 4096
    sequences: int = 4
    length: int = 256

    def __str__(self) -> str:
        blocks = f"{self.num_blocks} blocks of width {self.width}, vocabulary {self.vocabulary:,}"
        return f"{blocks}; {self.sequences} x {self.length} tokens per rank"


QUICK = Sizes(width=64, num_blocks=2, head=16, vocabulary=256, sequences=1, length=32)


class Block(nn.Module):
    """Causal attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.head = sizes.head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (self._heads(layer(y)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


class Decoder(nn.Module):
    """[batch, length] tokens -> [batch, length, vocabulary] logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_blocks))
        self.norm = nn.LayerNorm(sizes.width)
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def build(sizes: Sizes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(sizes)


def wrap(model: Decoder, way: str, device_type: str = "cpu") -> nn.Module:
    """Run a model on a device one of the :data:`WAYS`, over all ranks."""
    if way == "one process":
        return model
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    if way == "FSDP1":
        policy, device = ModuleWrapPolicy([Block]), torch.device(device_type)
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=device, use_orig_params=True
        )
    if way == "TP":
        for block in model.blocks:
            columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            rows = dict.fromkeys(("o", "down"), RowwiseParallel())
            parallelize_module(block, mesh, {**columns, **rows})
        return model
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": half} if "bf16" in way else {}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
