"""Fisher and Taylor by global batches, and masks from end to end: those of one process."""

import copy

import pytest
import torch.distributed as dist

import distprune as prune
from distprune.criteria import Fisher, Taylor
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assembled, assert_nothing_wrong, wrong_masks
from helpers.micro_batches import (
    CRITERIA,
    calibrate,
    data_rank,
    expected_scores,
    gradients_of_units,
    loss_of,
    make_criterion,
    make_model,
    micro_batch,
    num_data_ranks,
    num_tensor_ranks,
    wrong_scores,
)
from helpers.models import fqns, target
from helpers.wrappings import local, sampled

NUM_STEPS, NUM_BATCHES = 2, 2
WEIGHTS = [3.0, 1.0]  # of the steps


def global_differences(wrapping: str, kind: str, data: str, loss_scale: float = 1.0) -> list[str]:
    """Steps of several micro-batches each; gradients are averaged over the ranks by the wrapper."""
    dense = make_model(wrapping, data)
    indices = wrappings.local_indices(copy.deepcopy(dense), wrapping)
    model = wrappings.wrap(copy.deepcopy(dense), wrapping)
    pairs = [target(wrappings.unwrapped(model), name) for name in fqns(dense)]
    power, factor = CRITERIA[kind]
    criterion = (
        Fisher(pairs, unit="global_batch")
        if kind == "fisher"
        else Taylor(pairs, unit="global_batch", power=power)
    )
    is_plain = wrappings.kind_of(wrapping) == "plain"  # replicas that see all data
    size = 1 if is_plain else num_data_ranks(wrapping)
    rank = 0 if is_plain else data_rank(wrapping)
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
    expected = expected_scores(dense, steps, power, factor)
    return wrong_scores(model, criterion.scores(), expected, indices, data, f"{kind}, {data},")


@pytest.mark.parametrize("wrapping", sampled([*wrappings.TRAINED, *wrappings.FSDP2_DIM1]))
def test_global_batches(wrapping):
    kind = list(CRITERIA)[wrappings.world_size(wrapping) % 3]
    size = wrappings.world_size(wrapping)
    # DDP divides what it has summed up before, too, which a third is not exact for.
    data = "float64" if wrapping == "ddp-3" else "integer float32"
    assert_nothing_wrong(run_ranks(global_differences, size, wrapping, kind, data))


@pytest.mark.parametrize("kind", ["taylor 1", "taylor 2"])
def test_a_loss_scale_of_global_batches(kind):
    arguments = "ddp-2", kind, "integer float32", 256.0
    assert_nothing_wrong(run_ranks(global_differences, 2, *arguments))


def mask_differences(wrapping: str, kind: str, data: str) -> list[str]:
    """Masks beside those of one process: by its own scores, or by these where they are rounded."""
    dense = make_model(wrapping, data)
    names = fqns(dense)
    indices = wrappings.local_indices(copy.deepcopy(dense), wrapping)
    model = wrappings.wrap(copy.deepcopy(dense), wrapping)
    criterion = make_criterion(kind, [target(wrappings.unwrapped(model), n) for n in names])
    calibrate(criterion, model, dense, wrapping, data, 3)
    scores = criterion.scores()
    units = gradients_of_units(dense, data, num_data_ranks(wrapping), 3)
    whole = expected_scores(dense, units, *CRITERIA[kind])
    if not data.startswith("integer"):
        for name in names:
            held = local(scores[target(wrappings.unwrapped(model), name)])
            parts: list = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (held, indices[name]))
            whole[name] = assembled(parts, whole[name].shape)
    keeps = reference.prune([whole[name].float() for name in names], 0.5)
    prune.global_unstructured(criterion.parameters, criterion.pruning_method, scores, amount=0.5)
    return wrong_masks(model, dict(zip(names, keeps, strict=True)), indices, f"{kind}, {data},")


@pytest.mark.parametrize("wrapping", sampled(wrappings.ALL))
def test_masks(wrapping):
    size = wrappings.world_size(wrapping)
    kind = list(CRITERIA)[size % 3]
    for data in ("integer float32", "float32" if num_tensor_ranks(wrapping) == 1 else "float64"):
        assert_nothing_wrong(run_ranks(mask_differences, size, wrapping, kind, data))


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
