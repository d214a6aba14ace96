"""What a device moves per element, counted; and the timing of it, rehearsed on a CPU."""

import os

import device_traffic
import pytest
import torch

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here, and does not interpret"
)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "is_pruned", "least"),
    [(torch.float32, False, 5), (torch.bfloat16, False, 3), (torch.bfloat16, True, 4)],
)
def test_kernels_move_each_byte_once(dtype, is_pruned, least):
    """The scores, a byte of mask, and the mask in force; and what is collected, 1 % of them."""
    pytest.importorskip("triton")
    by_torch, by_kernels = device_traffic.counted(dtype, is_pruned=is_pruned)
    assert least < by_kernels < 1.1 * least
    assert by_torch > 8 * least


def test_operations_are_counted_once_and_views_not_at_all():
    values, flags = torch.ones(100), torch.zeros(100, dtype=torch.bool)
    with device_traffic.Traffic() as traffic:
        values.view(10, 10)[2:]
        assert traffic.num_bytes == 0
        torch.ge(values, 1.0, out=flags)  # reads 4 bytes, writes 1
        assert traffic.num_bytes == 500
        flags &= flags.logical_not()  # reads 1, writes 1; reads 2, writes 1
        assert traffic.num_bytes == 1000
        values[torch.tensor([3, 4])]  # two indices, which were made, two values twice
    assert traffic.num_bytes < 1100


def test_timing_is_rehearsed_on_a_cpu():
    found = device_traffic.timed(torch.bfloat16, 4000, torch.device("cpu"), rounds=2)
    assert found["masks_agree"] and found["fused"] is None
    assert found["torch"] > 0 and found["copy"] > 0 and found["bytes"] == 12_000
