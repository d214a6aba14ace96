"""verify: what a model has to match, of reports, checkpoints and earlier prunings."""

import copy

import pytest
from healthy_models import found, make, prune_all, train

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, assert_nothing_wrong_on


def save(wrapping: str, path: str, with_records: bool) -> None:
    import torch.distributed.checkpoint as dcp

    model = make(wrapping)
    prune_all(model, 0.3)
    state = prune.checkpoint.get_state_dict(model)
    if not with_records:  # as earlier versions wrote it
        del state["masks"]
    dcp.save(state, checkpoint_id=path)


def load(wrapping: str, path: str, with_records: bool) -> list[str]:
    wrong = []
    for amount in (None, 0.5):
        model = make(wrapping)
        if amount is not None:
            prune_all(model, amount)
        prune.checkpoint.load(path, model)
        wrong += found(model, f"loaded, pruned before: {amount}")
        wrappings.local(prune.select(model, "l1")[0][0].weight_mask).fill_(1)
        if prune.verify(model, raise_errors=False).ok == with_records:
            wrong.append("a mask that changed after loading is not told")
    return wrong


@pytest.mark.parametrize("first, second", [("fsdp2-3", "fsdp1-2"), ("fsdp2-2", "plain-1")])
@pytest.mark.parametrize("with_records", [True, False])
def test_checkpoints_tell_what_was_known_of_the_masks(first, second, with_records, tmp_path):
    path = str(tmp_path / "checkpoint")
    run_ranks(save, wrappings.world_size(first), first, path, with_records)
    size = wrappings.world_size(second)
    assert_nothing_wrong(run_ranks(load, size, second, path, with_records))


def other_masks(wrapping: str) -> list[str]:
    model, other = make(wrapping), make(wrapping)
    prune_all(model, 0.5)
    prune_all(other, 0.2)
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    report = prune.verify(model, raise_errors=False)
    if report.ok or not all("changed since the last" in text for text in report.all_problems):
        return [str(report)]
    return found(other, "other", expected=prune.verify(other))


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp1-2", "fsdp2-3", "tp-2"])
def test_masks_that_were_loaded_by_hand_are_told(wrapping):
    assert_nothing_wrong_on(wrapping, other_masks)


def test_what_is_expected_and_missing_is_told():
    model = make("plain-1")
    report = prune_all(model)
    fresh = make("plain-1")
    with pytest.raises(prune.VerificationError, match=r"l2.weight: it is expected to be pruned"):
        prune.verify(fresh, expected=report)
    with pytest.raises(prune.VerificationError, match="nothing is pruned"):
        prune.verify(fresh)
    assert prune.verify(fresh, expected=()).ok
    assert prune.verify(model, expected=["l1.weight", "l2.weight"]).ok
    assert prune.verify(model, expected=prune.select(model)).ok
    with pytest.raises(prune.VerificationError, match=r"l1.bias: it is expected"):
        prune.verify(model, expected=[*prune.select(model), "l1.bias"])
    prune_all(model, 0.1)
    with pytest.raises(prune.VerificationError, match="as in the report"):
        prune.verify(model, expected=report)
    with pytest.raises(TypeError, match=r"expected\[0\] is 1"):
        prune.verify(model, expected=[1])
    with pytest.raises(TypeError, match="model is a list"):
        prune.verify([model])


def follow(wrapping: str) -> list[str]:
    model = make(wrapping)
    pruner = prune.schedule.ScheduledPruner(
        prune.select(model, "l1"), prune.schedule.OneShot(1, 0.5), verify_every=2
    )
    wrong = []
    for step in range(8):
        train(model, 1)
        if step == 6:
            module, _ = prune.select(model, "l1")[0]
            mask = wrappings.local(module.weight_mask)
            mask.copy_(1 - mask.int())
        try:
            pruner.step()
        except prune.VerificationError as error:
            wrong.append(f"{step}: {'l1.weight' in str(error)}")
    return wrong if wrong != ["7: True"] or pruner.num_steps != 8 else []


@pytest.mark.parametrize("wrapping", ["plain-1", "ddp-2", "fsdp2-2"])
def test_a_schedule_verifies_every_few_steps(wrapping):
    assert_nothing_wrong_on(wrapping, follow)


def test_verify_every_is_a_number_of_steps():
    model = make("plain-1")
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="verify_every="):
            prune.schedule.ScheduledPruner(
                prune.select(model),
                prune.schedule.OneShot(1, 0.5),
                verify_every=wrong,
            )
