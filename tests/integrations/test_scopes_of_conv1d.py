"""Conv1D of transformers, [in, out], is pruned as nn.Linear with the same weights, [out, in]."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune.testing import run_ranks

pytest.importorskip("transformers")

SIZES = [(24, 16), (16, 40), (12, 8)]  # (in, out); 16 is cut into 2 x 8 by 2 ranks
CALLS = {
    "row": {"scope": "row", "amount": 0.4},
    "2:4": {"pattern": "2:4"},
    "1:4": {"pattern": "1:4"},
    "global": {"amount": 0.5, "normalize": "rms"},
    "layer": {"amount": 0.5, "scope": "layer"},
}
# Equal scores go by position, which is the same inside of one output only.
MAY_HAVE_TIES = {"row", "2:4", "1:4"}


class SideBySide(nn.Module):
    def __init__(self, kind: str, data: str) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        generator = torch.Generator().manual_seed(7)
        self.layers = nn.ModuleList()
        for num_in, num_out in SIZES:
            weight = torch.randn(num_out, num_in, generator=generator)
            weight = weight.sign() * weight.abs().ceil() if data == "few" else weight
            is_linear = kind == "linear"
            layer = nn.Linear(num_in, num_out) if is_linear else Conv1D(num_out, num_in)
            layer.weight = nn.Parameter(weight if is_linear else weight.t().contiguous())
            self.layers.append(layer)

    def forward(self, inputs: list[torch.Tensor]) -> None:
        for layer, x in zip(self.layers, inputs, strict=True):
            layer(x)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def masks(kind: str, data: str, scores: str, is_sharded: bool) -> dict[str, list[torch.Tensor]]:
    """The whole masks of each call, with outputs first."""
    generator = torch.Generator().manual_seed(8)
    inputs = [torch.randn(9, num_in, generator=generator) for num_in, _ in SIZES]
    found = {}
    for name, call in CALLS.items():
        if data == "few" and name not in MAY_HAVE_TIES:
            continue
        model = SideBySide(kind, data)
        if is_sharded:
            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        pairs = prune.select(model, names="weight")
        given = None
        if scores == "wanda":
            statistics = prune.statistics.ActivationStatistics(pairs)
            with statistics.collecting():
                model(inputs)
            given = statistics.wanda()
        prune.global_unstructured(pairs, prune.L1Unstructured, given, **call)
        of_call = [whole(layer.weight_mask).bool() for layer in model.layers]
        found[name] = [mask if kind == "linear" else mask.t() for mask in of_call]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("scores", ["magnitudes", "wanda"])
@pytest.mark.parametrize("data", ["normal", "few"])
def test_masks_are_those_of_linear_layers(data, scores, is_sharded):
    expected = masks("linear", data, scores, False)
    size = 2 if is_sharded else 1
    for found in run_ranks(masks, size, "conv1d", data, scores, is_sharded):
        assert found.keys() == expected.keys()
        for name, of_call in expected.items():
            assert any(not mask.all() for mask in of_call)
            for ours, theirs in zip(found[name], of_call, strict=True):
                assert torch.equal(ours, theirs), name
