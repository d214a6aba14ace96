"""The parts on ranks: wrong masks and hangs are found out."""

import os
import subprocess
import sys
import time

import bench
import data
import pytest
import sharded_models
import torch
import torch.distributed as dist
from measuring import CheckFailed

from helpers.collective_traffic import Traffic
from helpers.on_ranks import on_ranks


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_the_part_on_ranks_runs_from_end_to_end():
    command = [sys.executable, bench.__file__, "--quick", "--parts", "ranks"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Sharded models on gloo ranks" in run.stdout


def wait_on_one_rank():
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_hang_does_not_last():
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="wait_on_one_rank on 2 ranks"):
        on_ranks(wait_on_one_rank, 2, timeout=5)
    assert time.monotonic() - started < 300  # not the 600 that it would take


def find_what_is_wrong():
    """What the checks say of one wrong bit on rank 1, and of a sum that is not reported."""
    model = data.build(200_000)
    values = data.weights(model)
    expected = data.oracle(values, 0.5)
    keeps = [
        torch.from_numpy(keep).view(value.shape)
        for keep, value in zip(data.expected_masks(values, expected), values, strict=True)
    ]
    sharded_models.shard(model, "fsdp2")
    keeps = [
        sharded_models.local_like(k, p)
        for k, (p, _) in zip(keeps, sharded_models.placed(model), strict=True)
    ]
    with Traffic() as traffic:
        report = sharded_models.prune(data.pairs(model))
        dist.all_reduce(torch.zeros(3, dtype=torch.int64))
    sharded_models.check_local_masks(model, keeps)
    if dist.get_rank() == 1:
        keeps[2].view(-1)[5] ^= True
    found = []
    for check in (
        lambda: sharded_models.check_local_masks(model, keeps),
        lambda: sharded_models.check_traffic(report, traffic),
    ):
        try:
            check()
            found.append("nothing")
        except CheckFailed as error:
            found.append(str(error))
    return found


@pytest.mark.thorough
@pytest.mark.slow
def test_wrong_masks_and_hidden_traffic_are_found():
    first, second = on_ranks(find_what_is_wrong, 2, timeout=300)
    assert first[0] == "nothing" and second[0] == "rank 1: the mask of parameter 2 is wrong"
    assert "report.num_collectives=" in first[1] and "report.num_collectives=" in second[1]
