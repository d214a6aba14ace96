"""The parts on ranks: wrong masks and hangs are found out."""

import time

import data
import pytest
import ranks
import torch
import torch.distributed as dist
from measuring import CheckFailed

from helpers.on_ranks import on_ranks

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


def wait_on_one_rank():
    if dist.get_rank() == 1:
        time.sleep(600)


def test_a_hang_does_not_last():
    with pytest.raises(TimeoutError, match="wait_on_one_rank on 2 ranks"):
        on_ranks(wait_on_one_rank, 2, timeout=5)


def find_one_wrong_bit():
    """What the check says of one on rank 1."""
    model = data.build(200_000)
    values = data.weights(model)
    keeps = data.expected_masks(values, data.oracle(values, 0.5))
    keeps = [torch.from_numpy(k).view(v.shape) for k, v in zip(keeps, values, strict=True)]
    ranks.shard(model, "fsdp2")
    keeps = [ranks.local_like(k, p) for k, p in zip(keeps, data.weights(model), strict=True)]
    ranks.prune(data.pairs(model))
    ranks.check_local_masks(model, keeps)
    if dist.get_rank() == 1:
        keeps[2].view(-1)[5] ^= True
    try:
        ranks.check_local_masks(model, keeps)
    except CheckFailed as error:
        return str(error)


def test_wrong_masks_are_found():
    found = on_ranks(find_one_wrong_bit, 2, timeout=300)
    assert found == [None, "rank 1: the mask of parameter 2 is wrong"]
