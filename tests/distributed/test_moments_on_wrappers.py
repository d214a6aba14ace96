"""Fisher and Taylor by global batches of several backwards, and by two calibrations."""

import pytest

import distprune as prune
from distprune.criteria import Fisher, Taylor
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong
from helpers.micro_batches import Wrapped, gradients_of_units, num_data_ranks
from helpers.models import fqns

NUM_STEPS, NUM_BATCHES = 2, 2
WEIGHTS = [3.0, 1.0]  # of the steps


def global_differences(wrapping: str, power: int, loss_scale: float) -> list[str]:
    """Steps of several micro-batches each; gradients are averaged over the ranks by the wrapper."""
    wrapped = Wrapped(wrapping, "integer float32")
    criterion = Taylor(wrapped.pairs, unit="global_batch", power=power)
    size = num_data_ranks(wrapping)
    with criterion.calibrating():
        for step in range(NUM_STEPS):
            with criterion.batch(weight=WEIGHTS[step], loss_scale=loss_scale):
                for number in range(NUM_BATCHES):
                    loss = wrapped.loss(NUM_BATCHES * step + number)
                    # Times the ranks: the average is then a sum of integers.
                    (loss * size * loss_scale).backward()
            wrapped.model.zero_grad()
    units = wrapped.units(NUM_STEPS * NUM_BATCHES)
    steps = []
    for step, weight in enumerate(WEIGHTS):
        chosen = [
            gradients
            for number, (_, gradients) in enumerate(units)
            if number % (NUM_STEPS * NUM_BATCHES) // NUM_BATCHES == step
        ]
        names = fqns(wrapped.dense)
        steps.append((weight, {name: sum(g[name] for g in chosen) for name in names}))
    return wrapped.wrong(criterion, steps, power, 1.0)


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
    wrapped = Wrapped(wrapping, "integer float32", sizes_for="tp-2")
    pairs = zip(wrapped.pairs, fqns(wrapped.dense), strict=True)
    criterion = Fisher(
        [prune.NamedParameter(*pair, name) for pair, name in pairs], unit="rank_batch"
    )
    if state is not None:
        criterion.load_state_dict(state)
    wrapped.calibrate(criterion)
    units = wrapped.units()
    if state is not None:
        units += gradients_of_units(wrapped.dense, wrapped.data, 2, 3)
    wrong = wrapped.wrong(criterion, units)
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
