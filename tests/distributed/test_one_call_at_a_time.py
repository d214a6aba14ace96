"""Two calls on one group at a time are refused."""

import threading

import pytest
import torch.distributed as dist

import distprune as prune
from distprune.testing import run_ranks
from helpers import wrappings
from helpers.comparisons import assert_nothing_wrong, outcome
from helpers.models import Net, fill, target

NAMES = ["l1.weight", "l2.weight"]


class Calling(prune.BasePruningMethod):
    """Ranks by values, and does something else while it is at it."""

    PRUNING_TYPE = "unstructured"
    DISTRIBUTED = "scores"

    def __init__(self, amount, action=None):
        self.amount = amount
        self.action = action

    def compute_scores(self, t):
        if self.action is not None:
            self.action()
        return t.abs()


class Action:
    """What one rank's method does once; to other ranks it looks the same."""

    def __init__(self, do):
        self.do = do

    def __call__(self):
        do, self.do = self.do, None
        if do is not None:
            do()


def model_and_targets(wrapping: str):
    model = wrappings.wrap(fill(Net(), "normal", "float32"), wrapping)
    return model, [target(wrappings.unwrapped(model), name) for name in NAMES]


def wrong_inside_a_call(wrapping: str, where: str) -> list[str]:
    """A second call on the same group: from a function that the first one calls, or a thread."""
    _, targets = model_and_targets(wrapping)
    other, other_targets = model_and_targets("plain-2")
    refused: list[tuple[str, str, list[str]]] = []

    def second() -> None:
        refused.append(
            outcome(
                other,
                lambda: prune.global_unstructured(other_targets, prune.L1Unstructured, amount=0.5),
            )
        )

    def in_thread() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    action = Action(second if where == "this thread" else in_thread)
    report = prune.global_unstructured(targets, Calling, amount=0.5, action=action)
    wrong = [] if report.num_pruned_now == 55 else [str(report)]
    ((kind, text, changed),) = refused
    if kind != "RuntimeError" or "under way" not in text or where not in text or changed:
        wrong.append(f"{kind}: {text}; changed {changed}")
    second()  # nothing is held after the call
    return wrong + ([] if refused[-1][0] == "nothing" else [str(refused[-1])])


@pytest.mark.parametrize("where", ["this thread", "another thread"])
@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-2"])
def test_a_call_inside_a_call(wrapping, where):
    assert_nothing_wrong(run_ranks(wrong_inside_a_call, 2, wrapping, where))


def wrong_with_two_groups() -> list[str]:
    """Two threads may call at the same time, each on a group of its own."""
    groups = [dist.new_group() for _ in range(2)]
    settings = [model_and_targets("plain-2") for _ in groups]
    errors: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for _ in range(5):
                prune.global_unstructured(
                    settings[which][1], prune.L1Unstructured, group=groups[which], amount=3
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [f"{type(error).__name__}: {error}" for error in errors]
    for _, targets in settings:
        pruned = sum(int((module.weight_mask == 0).sum()) for module, _ in targets)
        wrong += [] if pruned == 15 else [f"{pruned} pruned"]
    return wrong


def test_threads_with_groups_of_their_own():
    assert_nothing_wrong(run_ranks(wrong_with_two_groups, 2))
