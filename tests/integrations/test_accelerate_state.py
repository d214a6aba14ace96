"""save_state and load_state of accelerate carry masks, schedules and criteria."""

import functools
import os

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

import distprune as prune
from distprune import criteria
from distprune.integrations.accelerate import load_state, register_pruning
from distprune.schedule import Cubic, ScheduledPruner
from distprune.testing import run_ranks
from integrations.test_accelerate import as_launched, real_fsdp2_on_the_cpu

SCHEDULE = Cubic(begin=1, end=7, frequency=2, final_sparsity=0.8)
TAYLOR = functools.partial(criteria.Taylor, unit="global_batch")


class Run:
    """A training run on this rank, as a script writes it."""

    def __init__(self, accelerator, make_criterion, seed=0):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        pairs = prune.select(self.model, exclude="3")
        self.criterion = make_criterion and make_criterion(pairs)
        options = {"importance_scores": self.criterion.scores} if self.criterion else {}
        self.pruner = ScheduledPruner(pairs, SCHEDULE, **options)
        register_pruning(
            accelerator, self.model, self.pruner,
            criteria=[self.criterion] if self.criterion else [],
        )  # fmt: skip

    def train(self, num_steps):
        rank, size = self.accelerator.process_index, self.accelerator.num_processes
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(-2, 3, (4, 6), generator=generator).float()[rank::size]
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            self.accelerator.backward(self.model(x).square().mean())
            if self.criterion:
                self.criterion.update()
            self.optimizer.step()
            self.pruner.step()
            prune.verify(self.model, expected=self.pruner.pruned_parameters)
        return self

    def state(self):
        state = {name.removeprefix("module."): t for name, t in self.model.state_dict().items()}
        whole = {k: t.full_tensor() if isinstance(t, DTensor) else t for k, t in state.items()}
        return {key: tensor.clone() for key, tensor in whole.items()}


def make_accelerator(wrapping) -> Accelerator:
    return real_fsdp2_on_the_cpu() if wrapping == "fsdp2" else Accelerator(cpu=True)


def interrupted_and_resumed(wrapping, folder, make_criterion) -> dict[str, torch.Tensor]:
    with as_launched(FSDP_VERSION="2"):
        run = Run(make_accelerator(wrapping), make_criterion).train(4)
        assert prune.is_pruned(run.model)
        run.accelerator.save_state(folder)
        run.train(6)
        undisturbed = run.state()
    with as_launched(FSDP_VERSION="2"):
        resumed = Run(make_accelerator(wrapping), make_criterion, seed=9)
        assert not prune.is_pruned(resumed.model)
        load_state(resumed.accelerator, folder, resumed.model)
        assert resumed.pruner.num_steps == 4
        resumed.train(6)
        state = resumed.state()
    assert state.keys() == undisturbed.keys()
    for key, value in undisturbed.items():
        assert torch.equal(state[key], value), key
    masks = [value for key, value in state.items() if key.endswith("_mask")]
    assert sum(int((mask == 0).sum()) for mask in masks) == round(0.8 * 80)
    return state


@pytest.mark.parametrize("wrapping", ["ddp", "fsdp2"])
@pytest.mark.parametrize("make_criterion", [None, TAYLOR], ids=["magnitude", "taylor"])
def test_two_ranks_resume_bit_for_bit(tmp_path, wrapping, make_criterion):
    folder = str(tmp_path / "state")
    one, other = run_ranks(interrupted_and_resumed, 2, wrapping, folder, make_criterion)
    assert all(torch.equal(one[key], other[key]) for key in one)


def one_process(folder):
    with as_launched():
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        run = Run(Accelerator(cpu=True), TAYLOR).train(4)
        run.accelerator.save_state(folder, safe_serialization=False)
        state = run.state()
        fresh = Run(Accelerator(cpu=True), TAYLOR, seed=9)
        fresh.accelerator._models[:] = [fresh.model]
        fresh.accelerator._optimizers[:] = [fresh.optimizer]
        load_state(fresh.accelerator, folder, fresh.model)
        assert all(torch.equal(state[key], value) for key, value in fresh.state().items())
        with pytest.raises(FileNotFoundError, match="no model 0 that accelerate saved"):
            load_state(fresh.accelerator, f"{folder}/missing", fresh.model)


def test_one_process_and_what_is_refused(tmp_path):
    run_ranks(one_process, 1, str(tmp_path / "state"))
