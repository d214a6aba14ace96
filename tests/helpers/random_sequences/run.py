"""Sequences of operations on sharded models, compared with one process after every operation.

After each operation masks, counts and weights equal those of the oracle bit for bit, and outputs
do at rounding level. After a training step weights are compared at rounding level, and then the
oracle's are written into the shards, so that the next pruning can be compared exactly. (This
direction needs no communication, and an error of the sharded model never reaches the oracle.)
"""

import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from distprune.testing import RankError, run_ranks
from helpers import wrappings
from helpers.random_sequences.operations import Run
from helpers.random_sequences.plans import Plan


@dataclass
class Outcome:
    """The operations and differences of one sequence on a rank."""

    plan: Plan
    operations: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *self.wrong])


@wrappings.sharing_meshes
def run_plans(plans: Sequence[Plan], folder: str) -> list[Outcome]:
    """Run sequences one after another, on every rank."""
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has some for every FSDP1 checkpoint
        for plan in plans:
            outcome = Outcome(plan)
            outcomes.append(outcome)
            run = Run(plan, Path(folder))
            for position, operation in enumerate(plan.operations):
                outcome.operations[operation.name] += 1
                wrong = run.do(operation)
                if wrong:
                    outcome.wrong = [f"after operation {position}, {operation.name}:", *wrong]
                    break
            if plan.compiler:
                torch._dynamo.reset()
    return outcomes


def run_together(plans: Sequence[Plan]) -> list[Outcome]:
    """Run sequences of one world size; return an outcome for each, with all ranks' differences.

    If a rank dies or hangs, the sequences are run one by one.
    """
    (world_size,) = {wrappings.world_size(plan.wrapping) for plan in plans}
    with tempfile.TemporaryDirectory(prefix="sequences") as folder:
        try:
            timeout = 300 if len(plans) > 1 else 60
            per_rank = run_ranks(run_plans, world_size, plans, folder, timeout=timeout)
        except RankError as error:
            if len(plans) == 1:
                return [Outcome(plans[0], wrong=[str(error)])]
            return [outcome for plan in plans for outcome in run_together([plan])]
    outcomes = []
    for of_ranks in zip(*per_rank, strict=True):
        lines = [f"[rank {r}] {line}" for r, each in enumerate(of_ranks) for line in each.wrong]
        outcomes.append(Outcome(of_ranks[0].plan, of_ranks[0].operations, lines))
    return outcomes


def assert_nothing_differs(plans: Sequence[Plan]) -> None:
    __tracebackhide__ = True
    wrong = [str(outcome) for outcome in run_together(plans) if outcome.wrong]
    assert not wrong, "\n\n".join(wrong)[:10000]


def shrunk(outcome: Outcome) -> Outcome:
    """Drop the operations of a sequence without which it still differs."""
    last = max(outcome.operations.total(), 1)
    plan = replace(outcome.plan, operations=outcome.plan.operations[:last])
    for position in reversed(range(last)):
        operations = plan.operations[:position] + plan.operations[position + 1 :]
        (shorter,) = run_together([replace(plan, operations=operations)])
        if shorter.wrong:
            plan, outcome = shorter.plan, shorter
    return outcome
