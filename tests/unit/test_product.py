"""The masked product that FSDP gathers has the bits of torch's product, in any dtype and layout."""

import pytest
import torch

from distprune.base import mask_values

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True, params=["in chunks", "at once"])
def way(request, monkeypatch):
    monkeypatch.setattr(mask_values, "_SMALL", 0 if request.param == "in chunks" else 1 << 60)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def hard_values(num: int, dtype: torch.dtype) -> torch.Tensor:
    """Both zeros, NaN with and without a sign, infinities, denormals, what overflows float16."""
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-40, -1e-7, 1e30, -7e4]
    values = torch.randn(num, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[: len(special)] = torch.tensor(special, dtype=torch.float64)[:num]
    return values[torch.randperm(num, generator=torch.Generator().manual_seed(1))].to(dtype)


def some_mask(num: int) -> torch.Tensor:
    return torch.rand(num, generator=torch.Generator().manual_seed(2)) < 0.5


def written(values: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full(values.shape, 7, dtype=dtype, device=values.device)
    mask_values.write_product(values, mask, out)
    return out


@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_are_those_of_the_product(dtype, out_dtype, device):
    values, mask = hard_values(5000, dtype).to(device), some_mask(5000).to(device)
    expected = (mask.to(dtype) * values).to(out_dtype)  # as one process computes it
    assert torch.equal(bits(written(values, mask, out_dtype)), bits(expected))
    assert torch.equal(bits(expected), bits((values * mask).to(out_dtype)))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (1,), (1, 40), (40, 1), (7, 3, 5), (40,)])
def test_shapes_that_chunks_do_not_divide(shape, monkeypatch):
    monkeypatch.setattr(mask_values, "_CHUNK", 8)
    num = torch.Size(shape).numel()
    values, mask = hard_values(num, torch.float32).view(shape), some_mask(num).view(shape)
    for out_dtype in FLOATS:
        expected = (values * mask).to(out_dtype)
        assert torch.equal(bits(written(values, mask, out_dtype)), bits(expected))


def test_any_strides(device):
    values = hard_values(600, torch.float32).to(device).view(20, 30).t()
    mask = some_mask(1200).to(device).view(30, 40)[:, ::2]
    assert torch.equal(bits(written(values, mask, torch.float32)), bits(values * mask))


def test_in_place(device):
    values, mask = hard_values(5000, torch.float32).to(device), some_mask(5000).to(device)
    expected = values * mask
    mask_values.write_product(values, mask, out=values)
    assert torch.equal(bits(values), bits(expected))


def test_integers(device):
    values, mask = torch.arange(-50, 50, device=device), some_mask(100).to(device)
    assert torch.equal(written(values, mask, torch.int64), values * mask)


def test_any_byte_but_zero_is_true():
    """So torch reads bools, and nothing keeps a file from having such bytes."""
    bytes_ = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    out = written(torch.tensor([3.0, 3.0, 3.0, 3.0]), bytes_.view(torch.bool), torch.float32)
    assert out.tolist() == [0.0, 3.0, 3.0, 3.0]
