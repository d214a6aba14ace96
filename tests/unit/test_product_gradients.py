"""The product that a pruned plain module is left with is the ordinary one, to every derivative."""

import math

import pytest
import torch
from torch.autograd import forward_ad

from distprune.product import masked_product

CASES = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float64), (torch.complex64, torch.complex64),
]  # fmt: skip


def operands(mask_dtype, dtype):
    original = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    original[0, 0], original[1, 1], original[2, 2] = -1.0, math.inf, math.nan
    mask = (torch.arange(30).view(6, 5) % 2).to(mask_dtype)
    mask[5, 4] = 3
    return mask, original.requires_grad_()


@pytest.mark.parametrize("mask_dtype, dtype", CASES)
def test_the_same_bits_as_the_plain_product(mask_dtype, dtype):
    mask, original = operands(mask_dtype, dtype)
    product, expected = masked_product(mask, original), mask.to(dtype) * original
    assert product.dtype == expected.dtype and product.stride() == expected.stride()
    as_real = torch.view_as_real if dtype.is_complex else torch.clone
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[as_real(product.detach()).itemsize]
    assert torch.equal(as_real(product.detach()).view(bits), as_real(expected.detach()).view(bits))


def test_gradients_of_gradients():
    mask, _ = operands(torch.float64, torch.float64)
    finite = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: masked_product(mask, x) ** 2, finite)
    assert torch.autograd.gradgradcheck(lambda x: masked_product(mask, x) ** 2, finite)


def test_forward_mode():
    mask = torch.tensor([0.0, 1.0, 3.0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3), torch.tensor([1.0, 2.0, 5.0]))
        tangent = forward_ad.unpack_dual(masked_product(mask, dual)).tangent
    assert tangent.tolist() == [0.0, 2.0, 15.0]


def test_a_frozen_parameter_stays_out_of_the_graph():
    assert not masked_product(torch.ones(3), torch.ones(3)).requires_grad
