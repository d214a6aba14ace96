"""States of criteria: saved on some ranks and loaded on others, the scores are the same bits."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp

import distprune as prune
from distprune.testing import RankError, run_ranks
from helpers import criteria_runs as runs
from helpers import wrappings
from helpers.comparisons import assembled, assert_nothing_wrong
from helpers.micro_batches import Wrapped, gradients_of_units
from helpers.models import fill, fqns
from helpers.sampling import every

CRITERIA = {
    "SNIP": prune.criteria.SNIP,
    "Fisher": lambda pairs: prune.criteria.Fisher(pairs, unit="global_batch"),
}


def case(wrapping: str, kind: str):
    """Random data, so that all bits of an accumulator matter; the same on every sharding."""
    dense = fill(runs.IntegerNet(wrappings.runnable_sizes("fsdp2_tp-1x2")), "normal", "float32")
    indices = wrappings.local_indices(dense, wrapping)
    model = wrappings.wrap(copy.deepcopy(dense), wrapping)
    return dense, indices, model, CRITERIA[kind](runs.named_targets(model, runs.WEIGHTS))


def save(wrapping: str, kind: str, path: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two units; (scores, indices) of what this rank has of each parameter."""
    dense, indices, model, criterion = case(wrapping, kind)
    part = wrappings.data_rank(wrapping)
    for batch in runs.batches(dense, 2):
        runs.backward(model, batch, *part)
        criterion.update(weight=0.37)
        model.zero_grad()
    dcp.save({"criterion": criterion.state_dict()}, checkpoint_id=path)
    scores = zip(runs.WEIGHTS, criterion.scores().values(), strict=True)
    return [(wrappings.local(score), indices[name]) for name, score in scores]


def load(wrapping: str, kind: str, path: str, expected: dict[str, torch.Tensor]) -> list[str]:
    _, indices, _, criterion = case(wrapping, kind)
    state = {"criterion": criterion.state_dict()}
    dcp.load(state, checkpoint_id=path)
    criterion.load_state_dict(state["criterion"])
    wrong = runs.differing(criterion.scores(), expected, indices)
    if (criterion.num_updates, criterion.total_weight) != (2, 0.74):
        wrong.append(f"{criterion.num_updates} updates of weight {criterion.total_weight}")
    return wrong


@pytest.mark.parametrize("kind", CRITERIA)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    every(
        2,
        [
            ("fsdp2-2", ["fsdp2-3", "plain-1", "fsdp2_tp-2x2"]),
            ("fsdp1-2", ["fsdp1-2"]),
            ("fsdp1_root-3", ["fsdp1_root-3"]),
            ("fsdp1_hybrid-2x2", ["fsdp1_hybrid-2x2"]),
            ("plain-1", ["fsdp2-2", "tp-2"]),
            ("hsdp-2x2", ["ddp-2", "fsdp2-2"]),
            ("fsdp2_tp-2x2", ["fsdp2-3", "plain-1"]),
        ],
    ),
)
def test_saved_here_and_loaded_there(saved, loaded, kind, tmp_path):
    parts = run_ranks(save, wrappings.world_size(saved), saved, kind, str(tmp_path))
    whole = runs.IntegerNet(wrappings.runnable_sizes("fsdp2_tp-1x2"))
    expected = {
        name: assembled(of_name, whole.get_parameter(name).shape)
        for name, of_name in zip(runs.WEIGHTS, zip(*parts, strict=True), strict=True)
    }
    for wrapping in loaded:
        size = wrappings.world_size(wrapping)
        wrong = run_ranks(load, size, wrapping, kind, str(tmp_path), expected)
        assert_nothing_wrong(wrong)


def goes_on(wrapping: str) -> list[bool]:
    """A criterion that took over the state of another one continues as that does."""
    dense, _, model, first = case(wrapping, "SNIP")
    batches = runs.batches(dense, 2)
    part = wrappings.data_rank(wrapping)
    runs.backward(model, batches[0], *part)
    first.update()
    second = CRITERIA["SNIP"](runs.named_targets(model, runs.WEIGHTS))
    second.load_state_dict(first.state_dict())
    model.zero_grad()
    runs.backward(model, batches[1], *part)
    for criterion in (first, second):
        criterion.update()
    scores = zip(first.scores().values(), second.scores().values(), strict=True)
    return [torch.equal(wrappings.local(a), wrappings.local(b)) for a, b in scores]


@pytest.mark.parametrize("wrapping", every(3, wrappings.sampled(wrappings.ALL)))
def test_a_loaded_criterion_goes_on(wrapping):
    for equal in run_ranks(goes_on, wrappings.world_size(wrapping), wrapping):
        assert equal == [True] * len(runs.WEIGHTS)


def misplaced() -> str:
    """9 rows on 4x2: DCP of torch 2.13 would lose rows."""
    model = runs.IntegerNet((6, 9, 5, 3))
    model = wrappings.wrap(model, "fsdp2_tp-4x2")
    criterion = prune.criteria.SNIP(runs.named_targets(model, ["l1.weight"]))
    with pytest.raises(NotImplementedError) as error:
        criterion.state_dict()
    return str(error.value)


def test_shards_that_dcp_would_misplace_are_refused():
    for text in run_ranks(misplaced, 8):
        assert "l1.weight" in text
        assert "FSDP2 cut out of tensor-parallel ones" in text


def resharded(wrapping: str, path: str) -> None:
    *_, criterion = case(wrapping, "SNIP")
    state = {"criterion": criterion.state_dict()}
    dcp.load(state, checkpoint_id=path)


def test_runs_are_not_loaded_on_another_sharding(tmp_path):
    run_ranks(save, 2, "fsdp1-2", "SNIP", str(tmp_path))
    with pytest.raises(RankError, match="Missing key in checkpoint"):
        run_ranks(resharded, 3, "fsdp1-3", str(tmp_path))


def continued(wrapping: str, state: dict | None = None) -> tuple[dict, list[str]]:
    """One of two calibrations; the second one, on another sharding, goes on with whole sums."""
    wrapped = Wrapped(wrapping, "integer float32", sizes_for="tp-2")
    pairs = zip(wrapped.pairs, fqns(wrapped.dense), strict=True)
    criterion = prune.criteria.Fisher(
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
    whole = {name: tensor.full_tensor() for name, tensor in saved["accumulators"].items()}
    return {**saved, "accumulators": whole}, wrong


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-3", "fsdp1-2", "fsdp2-3", "hsdp-2x2"])
def test_a_saved_calibration_goes_on_elsewhere(wrapping):
    (state, wrong), _ = run_ranks(continued, 2, "fsdp2-2")
    assert not wrong
    ranks = run_ranks(continued, wrappings.world_size(wrapping), wrapping, state)
    assert_nothing_wrong(wrong for _, wrong in ranks)
