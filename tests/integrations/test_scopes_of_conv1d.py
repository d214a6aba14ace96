"""Conv1D of transformers, [in, out], is pruned as nn.Linear with the same weights, [out, in]."""

import pytest
import torch
from torch import nn

import distprune as prune

pytest.importorskip("transformers")

CALLS = [
    {"scope": "row", "amount": 0.4}, {"pattern": "2:4"}, {"pattern": "1:4"},
    {"amount": 0.5, "normalize": "rms"}, {"amount": 0.5, "scope": "layer"},
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("scores", ["magnitudes", "wanda"])
def test_masks_are_those_of_linear_layers(scores, call):
    from transformers.pytorch_utils import Conv1D

    masks = []
    for kind in ("linear", "conv1d"):
        generator = torch.Generator().manual_seed(7)
        layers = nn.ModuleList([nn.Linear(24, 16), nn.Linear(16, 40), nn.Linear(12, 8)])
        for number, linear in enumerate(layers):
            weight = torch.randn(linear.weight.shape, generator=generator)
            # Equal scores go by position, which is the same inside of one output only.
            if "pattern" in call or call.get("scope") == "row":
                weight = weight.sign() * weight.abs().ceil()
            if kind == "conv1d":
                layers[number] = Conv1D(*weight.shape)
                weight = weight.t().contiguous()
            layers[number].weight = nn.Parameter(weight)
        pairs = prune.select(layers, names="weight", everything=True)
        given = None
        if scores == "wanda":
            statistics = prune.statistics.ActivationStatistics(pairs)
            with statistics.collecting():
                for layer, num_inputs in zip(layers, (24, 16, 12), strict=True):
                    layer(torch.randn(9, num_inputs, generator=generator))
            given = statistics.wanda()
        prune.global_unstructured(pairs, prune.L1Unstructured, given, **call)
        found = [layer.weight_mask for layer in layers]
        masks.append(found if kind == "linear" else [mask.t() for mask in found])
    for ours, theirs in zip(*masks, strict=True):
        assert not theirs.all() and torch.equal(ours, theirs)
