"""Tied weights are one parameter: counted once, and masked wherever they are used."""

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.models import fill

WRAPPINGS = ["plain-1", "plain-2", "ddp-2", "fsdp2_root-2", "fsdp2_root-3"]


class TiedNet(nn.Module):
    """Input and output embedding share one weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.hidden(self.embedding(tokens))))


def outcome(wrapping: str, given: str) -> dict[str, object]:
    """Prune 20 of 28 + 16 elements, the tied weight given once or under both names."""
    dense = fill(TiedNet(), "normal", "float32")
    model = wrappings.wrap(fill(TiedNet(), "normal", "float32"), wrapping)
    inner = wrappings.unwrapped(model)
    pairs = [(inner.embedding, "weight"), (inner.hidden, "weight"), (inner.head, "weight")]
    if given == "select":
        pairs = prune.select(model, everything=True)
    elif given == "second name":
        pairs = [pairs[2], pairs[1]]
    report = prune.global_unstructured(pairs, prune.L1Unstructured, amount=20)

    embedding, hidden = dense.embedding.weight.detach(), dense.hidden.weight.detach()
    keeps = reference.prune([embedding, hidden], 20)
    tied, hidden = embedding * keeps[0], hidden * keeps[1]
    tokens = torch.tensor([0, 3, 6, 2])
    expected = torch.relu(tied[tokens] @ hidden.T) @ tied.T
    masked = model(tokens)
    masked.sum().backward()
    for module, name in pairs:
        if prune.is_pruned(module):  # one removal may do for all names
            prune.remove(module, name)
    removed = model(tokens)
    return {
        "num_elements": report.num_elements,
        "num_pruned": report.num_pruned,
        "masked": torch.allclose(masked, expected, atol=1e-6),
        "removed": torch.allclose(removed, expected, atol=1e-6),
        "still tied": inner.head.weight is inner.embedding.weight,
    }


CASES = [
    *((wrapping, "select") for wrapping in WRAPPINGS),
    *((wrapping, "both names") for wrapping in WRAPPINGS),
    # Of a plain module given alone torch leaves the twin dense, and so does distprune.
    *((wrapping, "second name") for wrapping in WRAPPINGS if "fsdp2" in wrapping),
]


@pytest.mark.parametrize(("wrapping", "given"), CASES)
def test_tied_weights(wrapping, given):
    expected = {
        "num_elements": 44,
        "num_pruned": 20,
        "masked": True,
        "removed": True,
        "still tied": True,
    }
    size = wrappings.world_size(wrapping)
    assert run_ranks(outcome, size, wrapping, given) == [expected] * size
