"""Pruned models with inputs for them, and how to train them."""

from __future__ import annotations

import torch
from equal_modules import fill_distinct, first_output
from torch import Tensor, nn

import distprune as prune


def linear(seed: int = 0, bias: bool = True) -> nn.Linear:
    return fill_distinct(nn.Linear(6, 5, bias=bias), torch.float32, seed)


def pruned_once() -> tuple[nn.Module, Tensor]:
    return prune.l1_unstructured(linear(), "weight", 0.5), torch.randn(3, 6)


def pruned_twice() -> tuple[nn.Module, Tensor]:
    module = prune.l1_unstructured(linear(), "weight", 0.3)
    prune.random_unstructured(module, "bias", 2)
    return prune.ln_structured(module, "weight", 1, 2, 0), torch.randn(3, 6)


def pruned_globally() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(linear(1), nn.ReLU(), nn.Linear(5, 2))
    prune.global_unstructured(
        prune.select(model, everything=True), prune.L1Unstructured, amount=0.5
    )
    return model, torch.randn(3, 6)


def pruned_lstm() -> tuple[nn.Module, Tensor]:
    model = fill_distinct(nn.LSTM(3, 4), torch.float32, 0)
    prune.l1_unstructured(model, "weight_hh_l0", 0.5)
    return prune.l1_unstructured(model, "weight_ih_l0", 0.5), torch.randn(5, 2, 3)


def pruned_encoder_layer() -> tuple[nn.Module, Tensor]:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    prune.l1_unstructured(model.self_attn.out_proj, "weight", 0.5)
    prune.l1_unstructured(model.self_attn, "in_proj_weight", 0.5)
    return prune.l1_unstructured(model.linear1, "weight", 0.5) and model, torch.randn(4, 2, 8)


MODELS = [pruned_once, pruned_twice, pruned_globally, pruned_lstm, pruned_encoder_layer]


def train(model: nn.Module, x: Tensor, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = first_output(model(x)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    return losses


def sparse_values_stay_zero(model: nn.Module) -> None:
    num_pruned = 0
    for name, mask in model.named_buffers():
        path, _, buffer = name.rpartition(".")
        value = getattr(model.get_submodule(path), buffer.removesuffix("_mask"))
        assert torch.equal(value[mask == 0], torch.zeros_like(value[mask == 0])), name
        num_pruned += int((mask == 0).sum())
    assert num_pruned > 0
