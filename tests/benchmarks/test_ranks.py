"""The parts on ranks: wrong masks and hangs are found out; the cost model finds its constants."""

import os
import subprocess
import sys
import time

import bench
import cost_model
import data
import numpy as np
import pytest
import sharded_models
import torch
import torch.distributed as dist
from cost_constants import Model, fit, non_negative_least_squares
from cost_points import Measured, Point
from cost_predictions import MODELS, NUM_RANKS, predictions
from gloo_ranks import on_gloo_ranks
from measuring import CheckFailed

from helpers.collective_traffic import Traffic
from helpers.sampling import every


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part, words", every(2, [("cost_model", "405B"), ("ranks", "fsdp2_tp-4x4")])
)
@pytest.mark.thorough
def test_parts_run_from_end_to_end(part, words):
    command = [sys.executable, bench.__file__, "--quick", "--parts", part]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert words in run.stdout


def wait_on_one_rank():
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.slow
def test_a_hang_does_not_last():
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="wait_on_one_rank on 2 ranks"):
        on_gloo_ranks(wait_on_one_rank, 2, timeout=5)
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


@pytest.mark.slow
def test_wrong_masks_and_hidden_traffic_are_found():
    first, second = on_gloo_ranks(find_what_is_wrong, 2, timeout=300)
    assert first[0] == "nothing" and second[0] == "rank 1: the mask of parameter 2 is wrong"
    assert "report.num_collectives=" in first[1] and "report.num_collectives=" in second[1]


TRUE = Model(
    fixed=3e-3,
    per_parameter=2e-4,
    per_element={"float32": 1.5e-9, "bfloat16": 9e-10},
    hop=5e-5,
    link=1e9,
    bandwidth=1e10,
    collectives=11,
    message=(-80_000.0, 40.0, 16_392.0),
)


def synthetic_points():
    for num_ranks in (1, 2, 4):
        for num_elements, num_parameters in ((10**6, 10), (10**6, 300), (10**8, 100)):
            for dtype, num_collectives in (("float32", 10), ("bfloat16", 11)):
                num_bytes = -80_000 + 40 * num_parameters + 16_392 * num_collectives
                sizes = num_ranks, num_elements, num_parameters, dtype
                point = Point(*sizes, 0.0, num_collectives, num_bytes)
                yield Point(*sizes, TRUE.of_point(point), num_collectives, num_bytes)


def test_the_cost_model_finds_the_constants_of_what_follows_it():
    model = fit(Measured(list(synthetic_points()), TRUE.bandwidth, TRUE.link))
    for name in ("fixed", "per_parameter", "hop", "link"):
        assert getattr(model, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert model.per_element == pytest.approx(TRUE.per_element, rel=1e-6)
    assert model.message == pytest.approx(TRUE.message, rel=1e-6)
    table = cost_model.residuals(model, Measured(list(synthetic_points()), 1e10, 1e9))
    assert {row[-1] for row in table.rows} <= {"+0", "-0"}


def test_constants_are_never_negative():
    matrix = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert non_negative_least_squares(matrix, np.array([3.0, 2.0, 1.0])) == [2.0, 0.0]
    assert non_negative_least_squares(matrix, np.array([1.0, 3.0, 5.0])) == (
        pytest.approx([1.0, 2.0])
    )


def test_every_row_of_the_predictions_says_that_it_was_computed():
    # Bytes per element, by torch's operations and by Triton's kernels.
    table = predictions(TRUE, {"bfloat16": (27.0, 3.2), "float32": (40.9, 5.1)})
    assert len(table.rows) == len(MODELS) * len(NUM_RANKS)
    assert all(row[-1] == "computed" for row in table.rows)
    sizes = {row[0]: float(row[2]) for row in table.rows}
    assert sizes["8B"] == pytest.approx(8.03e9, rel=0.01)  # as published
    assert sizes["70B"] == pytest.approx(70.6e9, rel=0.01)
    assert sizes["405B"] == pytest.approx(405.9e9, rel=0.01)
