"""Fisher and Taylor by global batches of several backwards, and by two calibrations."""

import copy

import pytest

import distprune as prune
from distprune.criteria import Fisher, Taylor
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.micro_batches import (
    calibrate,
    data_rank,
    expected_scores,
    gradients_of_units,
    loss_of,
    make_model,
    micro_batch,
    num_data_ranks,
    wrong_scores,
)
from helpers.models import fqns, target

NUM_STEPS, NUM_BATCHES = 2, 2
WEIGHTS = [3.0, 1.0]  # of the steps


def global_differences(wrapping: str, power: int, loss_scale: float) -> list[str]:
    """Steps of several micro-batches each; gradients are averaged over the ranks by the wrapper."""
    data = "integer float32"
    dense = make_model(wrapping, data)
    indices = wrappings.local_indices(copy.deepcopy(dense), wrapping)
    model = wrappings.wrap(copy.deepcopy(dense), wrapping)
    pairs = [target(wrappings.unwrapped(model), name) for name in fqns(dense)]
    criterion = Taylor(pairs, unit="global_batch", power=power)
    size, rank = num_data_ranks(wrapping), data_rank(wrapping)
    with criterion.calibrating():
        for step in range(NUM_STEPS):
            with criterion.batch(weight=WEIGHTS[step], loss_scale=loss_scale):
                for number in range(NUM_BATCHES):
                    batch = micro_batch(dense, data, rank, NUM_BATCHES * step + number)
                    # Times the ranks: the average is then a sum of integers.
                    (loss_of(model, batch) * size * loss_scale).backward()
            model.zero_grad()
    units = gradients_of_units(dense, data, size, NUM_STEPS * NUM_BATCHES)
    steps = []
    for step, weight in enumerate(WEIGHTS):
        chosen = [
            gradients
            for number, (_, gradients) in enumerate(units)
            if number % (NUM_STEPS * NUM_BATCHES) // NUM_BATCHES == step
        ]
        steps.append((weight, {name: sum(g[name] for g in chosen) for name in fqns(dense)}))
    expected = expected_scores(dense, steps, power, 1.0)
    return wrong_scores(model, criterion.scores(), expected, indices, data)


@pytest.mark.parametrize(
    ("wrapping", "power", "loss_scale"),
    [
        ("ddp-2", 1, 256.0), ("ddp-2", 2, 256.0), ("fsdp1-2", 2, 1.0), ("fsdp2_dim1-3", 2, 1.0),
        ("hsdp-2x2", 1, 1.0), ("fsdp2_tp-2x2", 2, 1.0),
    ],
)  # fmt: skip
def test_global_batches_of_several_backwards(wrapping, power, loss_scale):
    size = wrappings.world_size(wrapping)
    assert_nothing_wrong(run_ranks(global_differences, size, wrapping, power, loss_scale))


def continued(wrapping: str, state: dict | None = None) -> tuple[dict, list[str]]:
    """One of two calibrations; the second one, on another sharding, goes on with whole sums."""
    data = "integer float32"
    dense = make_model("tp-2", data)
    indices = wrappings.local_indices(copy.deepcopy(dense), wrapping)
    model = wrappings.wrap(copy.deepcopy(dense), wrapping)
    names = fqns(dense)
    pairs = [prune.NamedParameter(*target(wrappings.unwrapped(model), n), n) for n in names]
    criterion = Fisher(pairs, unit="rank_batch")
    if state is not None:
        criterion.load_state_dict(state)
    calibrate(criterion, model, dense, wrapping, data, 3)
    units = gradients_of_units(dense, data, num_data_ranks(wrapping), 3)
    if state is not None:
        units = [*gradients_of_units(dense, data, 2, 3), *units]
    expected = expected_scores(dense, units, 2, 0.5)
    wrong = wrong_scores(model, criterion.scores(), expected, indices, data)
    if state is not None:
        return {}, wrong
    saved = criterion.state_dict()
    whole = {name: tensor.full_tensor() for name, tensor in saved["accumulators"]["moment"].items()}
    return {**saved, "accumulators": {"moment": whole}}, wrong


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-3", "fsdp1-2", "fsdp2-3", "hsdp-2x2"])
def test_a_saved_calibration_goes_on_elsewhere(wrapping):
    (state, wrong), _ = run_ranks(continued, 2, "fsdp2-2")
    assert not wrong
    ranks = run_ranks(continued, wrappings.world_size(wrapping), wrapping, state)
    assert_nothing_wrong(wrong for _, wrong in ranks)
