"""Fingerprints and counts of masks by Triton's kernels, by torch's operations, and on a CPU.

The kernels are interpreted here, with small blocks. Every number is compared bit for bit.
"""

import math
import os
from unittest import mock

import numpy as np
import pytest
import torch

from distprune._common import mask_kernels, memory
from distprune.selection import passes
from helpers.rehearsal import as_on_device

BLOCK = 64
TABLE = 1 << 20  # elements of a table of weights
DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = (0, 1, 31, 32, 33, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7)


@pytest.fixture
def triton_masks(monkeypatch):
    """The kernels, interpreted."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here, and does not interpret")
    from distprune._common import triton_masks

    monkeypatch.setattr(triton_masks, "BLOCK", BLOCK)
    return triton_masks


def on_device(run, triton):
    """What a function returns on a device, by Triton's kernels or by torch's operations."""
    with as_on_device(triton=triton):
        return run()


def random_values(size, seed, dtype):
    """Zeros of both signs, ones, and others."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 4, (size,), generator=generator)
    if dtype is torch.bool:
        return (numbers * 85).to(torch.uint8).view(torch.bool)  # true bytes of files are any
    if not dtype.is_floating_point:
        return numbers.to(dtype)
    return torch.tensor([0.0, -0.0, 1.0, -1e-3]).to(dtype)[numbers]


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts(dtype, aligned, triton_masks, monkeypatch):
    monkeypatch.setattr(triton_masks, "_NUM_TILES", 2)
    special = [0.0, -0.0, 1.0, math.nan, -math.inf, math.inf, 6e-8, -3.0]
    reads, expected = [], []
    for seed, length in enumerate(LENGTHS):
        gap = 0 if aligned else seed
        mask = random_values(gap + length, seed, dtype)[gap:]
        under = mask.double() == 0
        counts = [int(under.sum()), int((mask == 1).sum())]
        if dtype is torch.bool:
            counts[1] = length - counts[0]
        generator = torch.Generator().manual_seed(seed)
        values_dtype = (torch.float32, torch.bfloat16, torch.float16, torch.float64)[seed % 4]
        numbers = torch.randint(0, 8, (2, gap + length), generator=generator)
        values, product = torch.tensor(special).to(values_dtype)[numbers][:, gap:]
        values, product = values.contiguous(), product.contiguous()
        finite = values.isfinite()
        full = [*counts, int((under & ~finite).sum()), int((under & (product != 0)).sum())]
        reads.append(triton_masks.MaskRead(mask, values, product))
        expected.append(full)
        reads.append(triton_masks.MaskRead(mask))
        expected.append([*counts, 0, 0])
    assert triton_masks.count(reads, torch.device("cpu")).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_live_elements_of_what_a_rank_counts(dtype, triton_masks):
    """Of parts of masks, of none, and where there is no mask."""
    masks = [None if length == 33 else random_values(length, length, dtype) for length in LENGTHS]
    counted = [range(length // 3, length // 2 + 1 if length else 0) for length in LENGTHS]

    def run():
        return passes.count_each_live(masks, counted)

    expected = run()
    assert sum(expected) > 20
    assert on_device(run, True) == expected
    assert on_device(run, False) == expected


def test_counts_of_the_longest_tiles(triton_masks):
    """A byte of each lane has room for every block."""
    length = triton_masks._LARGEST_TILE * BLOCK + BLOCK - 1
    with mock.patch.object(triton_masks, "_tile_size", lambda n: 2 * length):
        mask, values = torch.zeros(length), torch.full((length,), math.nan)
        found = triton_masks.count([triton_masks.MaskRead(mask, values, values)], mask.device)
        ones = triton_masks.count([triton_masks.MaskRead(mask + 1)], mask.device)
    assert found.tolist() == [[length, 0, length, length]]
    assert ones.tolist() == [[0, length, 0, 0]]


def test_what_the_kernels_do_not_take(triton_masks):
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    refused = [torch.ones(3, dtype=torch.complex64), torch.ones(3).to(torch.float8_e5m2), freed]
    assert not any(triton_masks.takes(torch.ones(3), tensor) for tensor in refused)
    assert triton_masks.takes(torch.ones(3), None, torch.empty(0))


def with_wrong_sum(weigh):
    return lambda *args: weigh(*args) + 1


def with_wrong_count(count):
    return lambda *args: count(*args) + torch.tensor([0, 0, 0, 1])


@pytest.mark.parametrize(
    ("name", "mistake", "said"),
    [
        ("weigh", with_wrong_sum, "weighted sums of masks differ"),
        ("count", with_wrong_count, "counts of masks differ"),
        (None, None, None),
    ],
)
def test_a_wrong_kernel_is_not_used(triton_masks, monkeypatch, caplog, name, mistake, said):
    monkeypatch.setattr(triton_masks, "BLOCK", 4096)
    if name is not None:
        monkeypatch.setattr(triton_masks, name, mistake(getattr(triton_masks, name)))
    mask_kernels._compiled_on.cache_clear()
    with caplog.at_level("WARNING"):
        found = mask_kernels._compiled_on(torch.device("cpu"))
    mask_kernels._compiled_on.cache_clear()
    assert (found is None) == (name is not None)
    assert (said or "") in caplog.text


def test_where_the_kernels_are_used(monkeypatch):
    monkeypatch.setattr(mask_kernels, "_compiled_on", lambda device: "compiled")
    assert mask_kernels.mask_kernels_on(torch.device("cpu")) is None
    monkeypatch.setattr(memory, "takes_numpy", lambda device: False)
    assert mask_kernels.mask_kernels_on(torch.device("cuda", 0)) == "compiled"
    assert mask_kernels.mask_kernels_on(torch.device("mps")) is None
    monkeypatch.setenv("DISTPRUNE_NO_TRITON", "1")
    assert mask_kernels.mask_kernels_on(torch.device("cuda", 0)) is None


def test_a_table_of_weights_is_cut_where_it_ends(triton_masks):
    """Tables of 2 words: a factor of its own for every 64 elements."""
    weights = torch.tensor([3, 5])
    mask = torch.zeros(200)
    runs = triton_masks.MaskRuns(mask, 200, np.array([31]))
    found = triton_masks.weigh([runs], weights, lambda numbers: 10**numbers)
    expected = sum(
        [3, 5][place // 32 % 2] * 2 ** (place % 32) * 10 ** (place // 64)
        for place in range(31, 231)
    )
    assert found.tolist() == [(expected + 2**63) % 2**64 - 2**63]
