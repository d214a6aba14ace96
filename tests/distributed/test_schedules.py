"""A schedule over several ranks: exact counts at every step, agreement, and resuming."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import distprune as prune
from distprune import schedule
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong, wrong_masks
from helpers.models import Net, fill

WRAPPINGS = [
    "plain-1", "plain-3", "ddp-2", "fsdp2-1", "fsdp2-3", "fsdp2_root-4", "hsdp-2x2", "tp-2",
    "fsdp2_tp-2x2",
]  # fmt: skip
NAMES = ["l1.weight", "l2.weight", "l3.weight"]
RAMP = schedule.Cubic(1, 8, 3, 0.7, initial_sparsity=0.1)
NUM_STEPS = 10
CEILING = 0.8


def targets_of(model) -> list:
    return prune.select(wrappings.unwrapped(model))


def values_at(step: int, name: str) -> torch.Tensor:
    """What a weight is after an optimizer step: other values at each, of another scale."""
    dense = fill(Net(), "few" if step % 2 else "normal", "float32", step)
    return dense.get_parameter(name).detach() * (1 + NAMES.index(name))


@torch.no_grad()
def optimizer_step(model, indices, step: int) -> None:
    for name, (module, parameter) in zip(NAMES, targets_of(model), strict=True):
        held = wrappings.local(wrappings.stored(module, parameter))
        held.copy_(wrappings.my_part(values_at(step, name), indices[name]))


def expected_masks() -> list[dict[str, torch.Tensor]]:
    """The masks after each step, by the oracle."""
    keeps = [torch.ones(Net().get_parameter(name).shape, dtype=torch.bool) for name in NAMES]
    history = []
    for step in range(NUM_STEPS):
        wanted = round(RAMP.sparsity_at(step) * 125) - sum(int((~keep).sum()) for keep in keeps)
        scores = [values_at(step, name) for name in NAMES]
        keeps = reference.prune_bounded(scores, wanted, [0] * 3, [CEILING] * 3, keeps)
        history.append(dict(zip(NAMES, keeps, strict=True)))
    return history


def make(wrapping: str):
    indices = wrappings.local_indices(Net(), wrapping)
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    pruner = schedule.ScheduledPruner(targets_of(model), RAMP, max_sparsity=CEILING)
    return model, indices, pruner


def differences(wrapping: str, folder: str, stop: int) -> list[str]:
    """Every step of a run; and of one that was saved after ``stop`` steps, and resumed."""
    expected, wrong = expected_masks(), []
    model, indices, pruner = make(wrapping)
    for step in range(NUM_STEPS):
        optimizer_step(model, indices, step)
        with Traffic() as traffic:
            report = pruner.step()
        if (report is not None) != RAMP.is_due(step):
            wrong.append(f"step {step}: the report is {report}")
        if not RAMP.is_due(step) and traffic.calls:
            wrong.append(f"step {step}: {traffic.calls} where nothing is due")
        if report is not None:
            calls = len(traffic.calls), sum(num_bytes for _, num_bytes in traffic.calls)
            if (report.num_collectives, report.bytes_sent) != calls and dist.get_world_size() > 1:
                wrong.append(f"step {step}: {report}; {calls} were sent")
            wrong += wrong_masks(model, expected[step], indices, f"step {step}")
        if step + 1 == stop:
            state = {"model": get_model_state_dict(model), "pruner": pruner}
            dcp.save(state, checkpoint_id=folder)
    if pruner.num_steps != NUM_STEPS or pruner.sparsity != 0.7:
        wrong.append(f"{pruner.num_steps} steps, sparsity {pruner.sparsity}")
    saved = pruner.state_dict()

    model, indices, pruner = make(wrapping)
    if stop > RAMP.begin:  # the masks have to have somewhere to go
        for module, name in targets_of(model):
            prune.identity(module, name)
    state = {"model": get_model_state_dict(model), "pruner": pruner}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    if pruner.num_steps != stop:
        wrong.append(f"resumed at step {pruner.num_steps}, not {stop}")
    for step in range(stop, NUM_STEPS):
        optimizer_step(model, indices, step)
        if pruner.step() is not None:
            wrong += wrong_masks(model, expected[step], indices, f"step {step}, resumed")
    wrong += wrong_masks(model, expected[-1], indices, "resumed, at the end")
    if pruner.state_dict() != saved:
        wrong.append(f"the state is {pruner.state_dict()}, and straight {saved}")
    pruner.remove()
    if prune.is_pruned(model):
        wrong.append("still pruned")
    return wrong


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_step_and_a_resumed_run(wrapping, tmp_path):
    """Saved in the middle of the ramp, between two due steps, or before the first of them."""
    turn, size = WRAPPINGS.index(wrapping), wrappings.world_size(wrapping)
    stop = (5, 1, 6)[turn % 3]
    assert_nothing_wrong(run_ranks(differences, size, wrapping, str(tmp_path), stop))


def of_one_group_of_ranks() -> list[int]:
    """Two halves of the world that prune models of their own, each by its own schedule."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = fill(Net(), "normal", "float32", seed=rank // 2)
    pruner = schedule.ScheduledPruner(
        targets_of(model), schedule.Linear(0, 2 + rank // 2, 1, 0.5), group=halves[rank // 2]
    )
    reports = [pruner.step() for _ in range(5)]
    return [report.num_pruned if report else 0 for report in reports]


def test_a_group_of_ranks_follows_a_schedule_of_its_own():
    first, second = [0, 31, 62, 0, 0], [0, 21, 42, 62, 0]
    assert run_ranks(of_one_group_of_ranks, 4) == [first, first, second, second]
