"""Pruned models under any wrapper, and what is wrong when verify should pass on them."""

import torch
from torch import nn

import distprune as prune
from helpers import wrappings
from helpers.comparisons import changes, snapshot
from helpers.models import Net, fill


def make(wrapping: str, dtype: str = "float32") -> nn.Module:
    return wrappings.wrap(fill(Net(wrappings.runnable_sizes(wrapping)), "normal", dtype), wrapping)


def prune_all(model: nn.Module, amount: float = 0.5, **kwargs) -> prune.PruningReport:
    return prune.global_unstructured(
        prune.select(model), prune.L1Unstructured, amount=amount, **kwargs
    )


def train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def found(model: nn.Module, when: str, report: prune.PruningReport | None = None, **kwargs):
    """What is wrong with a verification that should pass, in words."""
    try:
        before = snapshot(model)
        result = prune.verify(model, **kwargs)
    except prune.VerificationError as error:
        return [f"{when}: {error}"]
    wrong = []
    if report is not None:
        counts = {entry.name: (entry.num_elements, entry.num_pruned) for entry in report.parameters}
        if {e.name: (e.num_elements, e.num_pruned) for e in result.parameters} != counts:
            wrong.append(f"{when}: other counts, {result}")
    if not result.ok or changes(before, snapshot(model)):
        wrong.append(f"{when}: {result.ok=}, changed {changes(before, snapshot(model))}")
    return wrong
