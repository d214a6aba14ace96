"""Pruned elements become +0, whatever stood there, and all others keep their bits."""

import pytest
import torch

from distprune.base.memory import zero_pruned

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64,
    torch.complex64, torch.complex128,
)  # fmt: skip
LAYOUTS = {
    "row-major": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "with gaps": lambda t: torch.stack([t, t], 2)[:, :, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_are_positive_and_the_rest_is_as_it_was(dtype, mask_dtype, layout, device):
    special = [1.5, -0.0, float("inf"), float("nan"), -2.0, 0.0]
    if not (dtype.is_floating_point or dtype.is_complex):
        special = [1, -1, 3, 127, -128, 0]
    values = torch.tensor([special, special, special], dtype=dtype, device=device)
    keep = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0]], device=device)
    changed = LAYOUTS[layout](values)
    zero_pruned(changed, LAYOUTS[layout](keep.to(mask_dtype)))
    found, before = (t.contiguous().view(torch.uint8).view(3, 6, -1) for t in (changed, values))
    assert torch.equal(found, before * keep.unsqueeze(2).to(torch.uint8))


def test_a_mask_of_other_numbers_prunes_where_it_is_zero():
    values = torch.ones(4)
    zero_pruned(values, torch.tensor([0.5, -0.0, float("nan"), 0.0]))
    assert values.tolist() == [1, 0, 1, 0]
