"""PruningCallback in the Trainer with criteria, and under FSDP2: stopped, resumed, bit for bit."""

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor

from distprune import criteria
from distprune.integrations.transformers import PruningCallback
from distprune.testing import run_ranks
from integrations.test_accelerate import as_launched, pretend_fsdp2
from integrations.test_transformers import SCHEDULE, StopAt, equal_states, make_trainer

TAYLOR = functools.partial(criteria.Taylor, unit="global_batch")


def new_callback(criterion, **options):
    return PruningCallback(
        SCHEDULE, exclude="lm_head", permanent=False, criterion=criterion, **options
    )


@pytest.mark.parametrize(
    "criterion",
    [
        pytest.param(criteria.Movement, marks=pytest.mark.thorough, id="mv"),
        pytest.param(TAYLOR, id="taylor"),
    ],
)
def test_a_criterion_ranks_and_resumes(tmp_path, criterion):
    undisturbed = make_trainer(tmp_path / "a", [new_callback(criterion)])
    undisturbed.train()
    make_trainer(tmp_path / "b", [new_callback(criterion), StopAt(4)]).train()
    callback = new_callback(criterion)
    resumed = make_trainer(tmp_path / "b", [callback])
    resumed.train(resume_from_checkpoint=True)
    assert equal_states(resumed.model, undisturbed.model)
    assert callback.last_report.sparsity == pytest.approx(0.8, abs=1e-3)
    magnitude = make_trainer(tmp_path / "c", [new_callback(None)])
    magnitude.train()
    assert not equal_states(magnitude.model, undisturbed.model)


def test_scopes_and_resetting(tmp_path):
    callback = new_callback(criteria.SNIP, scope="layer", reset_criterion=True)
    trainer = make_trainer(tmp_path, [callback], max_steps=8, save_strategy="no")
    trainer.train()
    for module, name in callback.pruner.parameters:
        mask = getattr(module, f"{name}_mask")
        assert int((mask == 0).sum()) == round(0.8 * mask.numel())
    assert callback._criterion.num_updates == 0  # step 7 was due, and the last one


def test_a_checkpoint_without_the_criterion_is_refused(tmp_path, caplog):
    make_trainer(tmp_path, [new_callback(None), StopAt(4)]).train()
    with pytest.raises(ValueError, match="is missing, with what Taylor has collected"):
        make_trainer(tmp_path, [new_callback(TAYLOR)]).train(resume_from_checkpoint=True)
    assert "clipped to max_grad_norm=1" in caplog.text


def trained_under_fsdp2(folder: str, criterion) -> dict[str, torch.Tensor]:
    states = []
    for name, stop in (("a", 99), ("b", 4), ("b", 99)):
        with as_launched(FSDP_VERSION="2"):
            callback = new_callback(criterion, verify_every=1)
            trainer = make_trainer(f"{folder}/{name}", [callback, StopAt(stop)])
            pretend_fsdp2()
            trainer.is_fsdp_enabled = True
            callback.attach(trainer)
            trainer.train(resume_from_checkpoint=len(states) == 2)
            state = trainer.model.state_dict()
            assert isinstance(state["model.layers.0.mlp.up_proj.weight_mask"], DTensor)
            states.append({k: t.full_tensor() for k, t in state.items()})
    undisturbed, _, resumed = states
    assert undisturbed.keys() == resumed.keys()
    for key, value in undisturbed.items():
        assert torch.equal(value, resumed[key]), key
    return undisturbed


@pytest.mark.thorough
@pytest.mark.parametrize(
    "criterion",
    [
        pytest.param(None, marks=pytest.mark.thorough, id="magnitude"),
        pytest.param(TAYLOR, id="taylor"),
    ],
)
def test_two_ranks_under_fsdp2(tmp_path, criterion):
    one, other = run_ranks(trained_under_fsdp2, 2, str(tmp_path), criterion)
    assert all(torch.equal(one[key], other[key]) for key in one)
    masks = [value for key, value in one.items() if key.endswith("_mask")]
    count = sum(mask.numel() for mask in masks)
    assert sum(int((mask == 0).sum()) for mask in masks) == round(0.8 * count)
