"""Channel norms: exact sums, the same bits on any sharding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distprune.methods.channels import joint_norms
from distprune.ranks.collectives import Communicator
from distprune.shards.geometry import dim_coordinates
from helpers.sampling import num_examples
from helpers.virtual_ranks import run_virtual_ranks

NORMS = (1, 2, math.inf)


def channel_norms(rows, n, channel_of_row, num_channels, channel_size, communicator):
    sizes = torch.full((num_channels,), channel_size)
    return joint_norms([lambda: (rows, channel_of_row, None)], n, sizes, communicator)


def norms_over(values, dim, n, split_dim, size):
    def on_rank(communicator):
        coordinates = dim_coordinates(values.shape, [(split_dim, size, communicator.index)])
        held = [torch.arange(rows.start, rows.stop) for rows in coordinates]
        part = values.index_select(split_dim, held[split_dim])
        channels = values.shape[dim]
        rows, channel_of_row = part.movedim(dim, 0), held[dim]
        if communicator.index % 2:  # every element as a row, as FSDP1's runs have it
            elements = rows.flatten(1)
            channel_of_row = channel_of_row.repeat_interleave(elements.shape[1])
            rows = elements.reshape(-1, 1)
        return channel_norms(
            rows, float(n), channel_of_row, channels, values.numel() // channels, communicator
        )

    return run_virtual_ranks(on_rank, size)


@settings(max_examples=num_examples(150), deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple),
    n=st.sampled_from(NORMS),
    size=st.integers(2, 5),
    scale=st.sampled_from([1.0, 1e-30, 1e30]),
    data=st.data(),
)
def test_any_sharding_gives_the_same_bits(shape, n, size, scale, data):
    dim, split_dim = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    values = torch.randn(shape, generator=generator) * scale
    values[torch.rand(shape, generator=generator) < 0.2] = 0
    (whole,) = norms_over(values, dim, n, 0, 1)
    for norms in norms_over(values, dim, n, split_dim, size):
        assert torch.equal(norms, whole)
    by_torch = torch.norm(
        values.double(), p=n, dim=[other for other in range(len(shape)) if other != dim]
    )
    torch.testing.assert_close(whole, by_torch, rtol=1e-12, atol=0.0)


def test_equal_channels_have_equal_norms_whatever_the_order_of_their_elements():
    row = torch.tensor([0.1, 0.7, 1e-3, 3.3, 0.1, 9.9])
    values = torch.stack([row, row.flip(0), row[torch.randperm(6)]])
    norms = channel_norms(values, 1.0, torch.arange(3), 3, 6, Communicator(()))
    assert norms[0] == norms[1] == norms[2]


def test_channels_of_very_different_size_keep_their_precision():
    values = torch.tensor([[1e30, 1e30], [3e-20, 4e-20], [3e-20, 4.0001e-20]])
    norms = channel_norms(values, 2.0, torch.arange(3), 3, 2, Communicator(()))
    assert norms[0] > norms[2] > norms[1]
    assert norms[1].item() == pytest.approx(5e-20, rel=1e-7)


def test_infinities_and_nan():
    values = torch.tensor([[1.0, math.inf], [1.0, 2.0], [math.nan, 1.0], [math.nan, math.inf]])
    for n in (1.0, 2.0, math.inf):
        norms = channel_norms(values, n, torch.arange(4), 4, 2, Communicator(()))
        assert norms[0] == math.inf and norms[1].isfinite()
        assert norms[2].isnan() and norms[3].isnan()


@pytest.mark.parametrize("n", NORMS)
@pytest.mark.parametrize("split_dim", [0, 1])
def test_a_nan_of_one_rank_is_one_of_the_channel(n, split_dim):
    values = torch.ones(4, 6)
    values[1, 0] = values[2, 5] = torch.nan
    for norms in norms_over(values, 0, n, split_dim, 3):
        assert norms.isnan().tolist() == [False, True, True, False]
