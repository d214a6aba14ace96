"""A schedule over several ranks: what its steps send, and groups with schedules of their own.

That its masks are those of one process, loaded ones too: test_operations.py, test_checkpoints.py.
"""

import pytest
import torch.distributed as dist

import distprune as prune
from distprune import schedule
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.collective_traffic import Traffic
from helpers.comparisons import assert_nothing_wrong_on
from helpers.models import Net, fill

RAMP = schedule.Cubic(1, 8, 3, 0.7, initial_sparsity=0.1)


def differences(wrapping: str) -> list[str]:
    """Exact counts where a step is due, and elsewhere nothing is sent."""
    model, wrong = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping), []
    pruner = schedule.ScheduledPruner(prune.select(model), RAMP, max_sparsity=0.8)
    for step in range(10):
        with Traffic() as traffic:
            report = pruner.step()
        sent = (0, 0)
        if report is not None:
            sent = report.num_collectives, report.bytes_sent
            if report.num_pruned != round(RAMP.sparsity_at(step) * 125):
                wrong.append(f"step {step}: {report}")
        if (report is not None) != RAMP.is_due(step):
            wrong.append(f"step {step}: the report is {report}")
        calls = len(traffic.calls), sum(num_bytes for _, num_bytes in traffic.calls)
        if sent != calls and dist.get_world_size() > 1:
            wrong.append(f"step {step}: {sent} is reported; {calls} were sent")
    pruner.remove()
    return wrong + ["still pruned"] * prune.is_pruned(model)


@pytest.mark.parametrize("wrapping", ["plain-1", "plain-3", "ddp-2", "fsdp2-3", "tp-2"])
def test_a_step_that_is_not_due_sends_nothing(wrapping):
    assert_nothing_wrong_on(wrapping, differences)


def of_one_group_of_ranks() -> list[int]:
    """Two halves of the world that prune models of their own, each by its own schedule."""
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = fill(Net(), "normal", "float32", seed=rank // 2)
    pruner = schedule.ScheduledPruner(
        prune.select(model), schedule.Linear(0, 2 + rank // 2, 1, 0.5), group=halves[rank // 2]
    )
    reports = [pruner.step() for _ in range(5)]
    return [report.num_pruned if report else 0 for report in reports]


def test_a_group_of_ranks_follows_a_schedule_of_its_own():
    first, second = [0, 31, 62, 0, 0], [0, 21, 42, 62, 0]
    assert run_ranks(of_one_group_of_ranks, 4) == [first, first, second, second]
