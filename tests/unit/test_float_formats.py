"""The table of float formats, against torch's own reading of every bit pattern of 8 and 16 bits."""

import numpy as np
import pytest
import torch

from distprune.base.float_formats import FLOATS, NARROW_FLOATS, PLAIN_FLOATS

IN_TORCH = [form for form in FLOATS.values() if form.torch_name]
SMALL = [form for form in IN_TORCH if form.num_bits <= 16]


def patterns_and_values(form):
    patterns = np.arange(1 << form.num_bits).astype(form.bits)
    values = torch.from_numpy(patterns).view(getattr(torch, form.torch_name)).double()
    return patterns, values


@pytest.mark.parametrize("form", SMALL, ids=lambda form: form.name)
def test_every_pattern_is_classified_as_in_torch(form):
    patterns, values = patterns_and_values(form)
    for test, expected in (
        (form.is_zero, values == 0),
        (form.is_inf, values.isinf()),
        (form.is_nan, values.isnan()),
    ):
        assert [test(int(pattern)) for pattern in patterns] == expected.tolist()


@pytest.mark.parametrize("form", PLAIN_FLOATS.values(), ids=lambda form: form.name)
def test_patterns_of_one_and_of_infinity(form):
    dtype = getattr(torch, form.torch_name)
    integer = getattr(torch, f"int{form.num_bits}")
    assert int(torch.tensor(torch.inf, dtype=dtype).view(integer)) == form.inf


@pytest.mark.parametrize("form", [f for f in SMALL if f.num_bits == 16], ids=lambda f: f.name)
def test_magnitudes_have_the_order_of_absolute_values(form):
    patterns, values = patterns_and_values(form)
    is_number = ~values.isnan().numpy()
    magnitudes = form.magnitudes(patterns)[is_number]
    by_magnitude, by_value = np.argsort(magnitudes), values.abs().numpy()[is_number]
    ascending = by_value[by_magnitude]
    assert np.all(ascending[:-1] <= ascending[1:])
    assert np.array_equal(magnitudes == 0, by_value == 0)


@pytest.mark.parametrize("form", IN_TORCH, ids=lambda form: form.name)
def test_sizes_are_those_of_torch(form):
    dtype = getattr(torch, form.torch_name)
    assert form.num_bytes == dtype.itemsize == np.dtype(form.bits).itemsize


def test_names_are_unique_and_say_the_layout():
    assert len(FLOATS) == len(PLAIN_FLOATS) + len(NARROW_FLOATS) == 12
    for form in NARROW_FLOATS.values():
        if "_" in form.name:
            layout = f"E{form.num_exponent_bits}M{form.num_fraction_bits}"
            assert form.name.startswith(f"F{form.num_bits}_{layout}")
