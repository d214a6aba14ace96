"""Parameters that are views with gaps get the masks of their contiguous copies."""

import pytest
import torch
from torch import nn

import distprune as prune

BASE = torch.arange(64.0).reshape(8, 8)
VIEWS = {
    "columns": lambda: BASE[:, ::2],
    "turned columns": lambda: BASE[:, ::2].t(),
    "turned rows": lambda: BASE[::2].t(),
    "turned part": lambda: BASE[:, 2:6].t(),
    "3-d": lambda: BASE.view(2, 4, 8)[:, ::2, ::2].permute(2, 0, 1),
}
CALLS = [
    {"amount": 0.5},
    {"amount": 0.5, "max_sparsity": 0.6},
    {"amount": 0.5, "scope": "row"},
    {"amount": 0.5, "scope": "layer"},
    {"pattern": "1:2"},
]


def masked(values, calls):
    module = nn.Module()
    module.weight = nn.Parameter(values)
    pair = (module, "weight")
    dims = {pair: values.ndim - 1}
    for call in calls:
        prune.global_unstructured([pair], prune.L1Unstructured, input_dims=dims, **call)
    return module.weight_mask


@pytest.mark.parametrize("calls", [*([call] for call in CALLS), CALLS[:1] * 2, CALLS[-2:]])
@pytest.mark.parametrize("view", VIEWS)
def test_same_masks_as_of_a_contiguous_copy(view, calls):
    values = VIEWS[view]()
    assert torch.equal(masked(values, calls), masked(values.contiguous(), calls))
