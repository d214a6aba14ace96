"""The table of dtypes, against torch's own reading of every bit pattern of 16 bits."""

import numpy as np
import pytest
import torch

from distprune.base.selecting import DTYPE_BITS, PLAIN_FLOATS, TORCH_NAMES


def patterns_and_values(form):
    patterns = np.arange(1 << form.num_bits).astype(form.bits)
    values = torch.from_numpy(patterns).view(getattr(torch, form.torch_name)).double()
    return patterns, values


@pytest.mark.parametrize("form", PLAIN_FLOATS.values(), ids=lambda form: form.name)
def test_patterns_of_one_and_of_infinity(form):
    dtype = getattr(torch, form.torch_name)
    integer = getattr(torch, f"int{form.num_bits}")
    assert int(torch.tensor(torch.inf, dtype=dtype).view(integer)) == form.inf


@pytest.mark.parametrize(
    "form", [f for f in PLAIN_FLOATS.values() if f.num_bits == 16], ids=lambda f: f.name
)
def test_magnitudes_have_the_order_of_absolute_values(form):
    patterns, values = patterns_and_values(form)
    is_number = ~values.isnan().numpy()
    magnitudes = form.magnitudes(patterns)[is_number]
    by_magnitude, by_value = np.argsort(magnitudes), values.abs().numpy()[is_number]
    ascending = by_value[by_magnitude]
    assert np.all(ascending[:-1] <= ascending[1:])
    assert np.array_equal(magnitudes == 0, by_value == 0)


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_sizes_are_those_of_torch(name):
    assert DTYPE_BITS[name] == 8 * getattr(torch, TORCH_NAMES[name]).itemsize
    if name in PLAIN_FLOATS:
        assert np.dtype(PLAIN_FLOATS[name].bits).itemsize == PLAIN_FLOATS[name].num_bytes
