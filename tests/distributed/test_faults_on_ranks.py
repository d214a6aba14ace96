"""A fault on one rank, at any point of a pruning: every rank raises, and nothing has changed.

Points are before and after every local step and every collective of the call. A rank *raises*
(out of memory, an interrupt, ...) in a step; its network *fails*; it is *killed*; or it is
*stopped* until the others have given up.
"""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import distprune as prune
from distprune.testing import run_ranks
from helpers import reference, wrappings
from helpers.comparisons import assert_nothing_wrong_on, changes, snapshot, wrong_masks
from helpers.models import Net, fill, target
from helpers.rank_faults import (
    GROUP_TIMEOUT,
    Injected,
    Injector,
    kill,
    raising,
    run_doomed_ranks,
    stop,
)
from helpers.sampling import THOROUGH, every

NAMES = ["l1.weight", "l2.weight", "l2.bias", "l3.weight"]
STEPS = ("before step", "after step")
WRAPPINGS = ["plain-2", "ddp-2", "fsdp1-2", "fsdp2-2", "tp-2", "fsdp2_tp-2x2", "hsdp-2x2"]
# All points of all wrappings take half an hour; some are taken, and all of them if asked to.
ALL_POINTS = bool(os.environ.get("DISTPRUNE_ALL_FAULTS"))

METHODS = {
    "l1": (prune.L1Unstructured, {"amount": 0.5}),
    "bounded": (prune.L1Unstructured, {"amount": 0.5, "min_sparsity": 0.4, "max_sparsity": 0.75}),
    "random": (prune.RandomUnstructured, {"amount": 0.5}),
    "ties": (prune.L1Unstructured, {"amount": 0.5}),
    "rows": (prune.L1Unstructured, {"scope": "row", "amount": 0.5}),  # which tp-2 cuts
}
ERRORS = {
    "memory": MemoryError("no room"),
    "odd text": Injected("a name with a lone surrogate: \udcff"),
    "interrupt": KeyboardInterrupt(),
    "exit": SystemExit(3),
}


class Setting:
    """A model that is pruned once, what a second pruning has to give, and how to ask for it."""

    def __init__(self, wrapping: str, method: str) -> None:
        data = "few" if method == "ties" else "normal"
        dense = fill(Net(), data, "float32")
        self.indices = wrappings.local_indices(dense, wrapping)
        self.model = wrappings.wrap(fill(Net(), data, "float32"), wrapping)
        self.targets = [target(wrappings.unwrapped(self.model), name) for name in NAMES]
        prune.global_unstructured(self.targets, prune.L1Unstructured, amount=0.3)
        scores = [dense.get_parameter(name).detach() for name in NAMES]
        first = reference.prune(scores, 0.3)
        self.keeps = dict(zip(NAMES, reference.prune(scores, 0.5, first), strict=True))
        self.method = method

    def prune(self) -> None:
        cls, arguments = METHODS[self.method]
        prune.global_unstructured(self.targets, cls, **arguments)

    def wrong_masks(self) -> list[str]:
        if self.method in ("random", "bounded", "rows"):
            return []
        return wrong_masks(self.model, self.keeps, self.indices)


def outcome_of(setting: Setting, injector: Injector) -> tuple[str, str, list[str]]:
    """(type of the error, its text, what changed)."""
    before = snapshot(setting.model)
    try:
        with injector.active():
            setting.prune()
        error = ("nothing", "")
    except BaseException as raised:
        error = (type(raised).__name__, ascii(str(raised)))
    return *error, changes(before, snapshot(setting.model))


def wrong_after_raising(wrapping: str, method: str, error: str, odd_rank: int) -> list[str]:
    """A fault in each local step, one after the other; the call works again in between."""
    wrong = []
    setting = Setting(wrapping, method)
    is_odd = dist.get_rank() == odd_rank
    for point in range(200):
        injector = Injector(point if is_odd else None, raising(ERRORS[error]), STEPS)
        kind, text, changed = outcome_of(setting, injector)
        ends = torch.tensor([int(kind == "nothing"), -int(kind == "nothing")])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends.tolist() != [-int(ends[1]), int(ends[1])]:
            return [*wrong, f"point {point}: only some ranks raised"]
        if kind == "nothing":  # there are fewer points than that
            return [*wrong, *([] if point > 10 else [f"only {point} points"])]
        wrong += [f"point {point}: changed {each}" for each in changed]
        if is_odd and not injector.has_fired:
            wrong.append(f"point {point}: the fault did not fire")
        expected = type(ERRORS[error]).__name__
        if not (kind == expected if is_odd and error in ("interrupt", "exit") else True):
            wrong.append(f"point {point}: {kind}, not {expected}")
        if f"on rank {odd_rank}" not in text and not is_odd:
            wrong.append(f"point {point}: {kind}: {text}")
    return [*wrong, "the call never works"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("wrapping", ["plain-2", "fsdp2-3"])
def test_an_error_in_any_step(wrapping, error):
    last = wrappings.world_size(wrapping) - 1
    assert_nothing_wrong_on(wrapping, wrong_after_raising, "l1", error, last)


@pytest.mark.parametrize(
    ("wrapping", "method"),
    [
        (wrapping, method)
        for turn, wrapping in enumerate(WRAPPINGS)
        for method in (METHODS if wrapping == "fsdp2-2" else every(len(METHODS), METHODS, turn))
    ],
)
def test_an_error_in_any_step_of_any_method(wrapping, method):
    assert_nothing_wrong_on(wrapping, wrong_after_raising, method, "memory", 0)


def wrong_after_a_retry(wrapping: str) -> list[str]:
    """After a fault in the middle the same call prunes, on this group and on a new one."""
    setting = Setting(wrapping, "ties")
    is_odd = dist.get_rank() == 0
    outcome_of(setting, Injector(8 if is_odd else None, raising(MemoryError()), STEPS))
    group = dist.new_group()
    cls, arguments = METHODS["ties"]
    prune.global_unstructured(setting.targets, cls, group=group, **arguments)
    return setting.wrong_masks()


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_call_works_after_a_fault(wrapping):
    assert_nothing_wrong_on(wrapping, wrong_after_a_retry)


FAULTS = {"fails": raising(ConnectionError("the network is gone")), "killed": kill, "stopped": stop}


def num_points(wrapping: str) -> list[str]:
    """The points of a call, as a rank comes by them."""
    setting = Setting(wrapping, "l1")
    with Injector(None).active() as injector:
        setting.prune()
    return injector.reached


def outcome_near(wrapping: str, fault: str, point: int, doomed: int, new_store: str) -> dict:
    """What this rank sees when one rank is lost; survivors then prune in a group of their own."""
    setting = Setting(wrapping, "l1")
    is_doomed = dist.get_rank() == doomed
    injector = Injector(point if is_doomed else None, FAULTS[fault])
    kind, text, changed = outcome_of(setting, injector)
    wrong = setting.wrong_masks() if kind == "nothing" else []
    if kind != "nothing" and not is_doomed and wrapping.startswith("plain"):
        prune_without(doomed, setting, new_store)
        wrong = setting.wrong_masks()
    return {
        "kind": kind,
        "text": text,
        "changed": changed,
        "wrong": wrong,
        "fired": injector.has_fired,
    }


def prune_without(doomed: int, setting: Setting, new_store: str) -> None:
    """The same call, on the ranks that are left; the last one is not."""
    rank, size = dist.get_rank(), dist.get_world_size() - 1
    assert doomed == size
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(new_store, size), rank=rank, world_size=size
    )
    setting.prune()


def wrong_near(wrapping: str, fault: str, point: int, is_last: bool) -> list[str]:
    """What survivors of a fault got wrong."""
    size = wrappings.world_size(wrapping)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (wrapping, fault, point, size - 1, os.path.join(folder, "store"))
        answers, seconds = run_doomed_ranks(
            outcome_near, size, size - 1, *arguments, is_stopped=fault == "stopped"
        )
    wrong, at = [], f"{wrapping} {fault} at point {point}"
    if (size - 1 in answers) == (fault == "killed"):
        wrong.append(f"{at}: the fault did not fire")
    for rank, seen in answers.items():
        if rank == size - 1 and not seen["fired"]:
            wrong.append(f"{at}: the fault did not fire")
        if seen["kind"] == "nothing":  # the last collective was over, so the pruning stands
            wrong += [] if is_last else [f"{at}: rank {rank} did not raise"]
        wrong += [f"{at}: rank {rank}: {each}" for each in seen["wrong"]]
        if seen["kind"] != "nothing":
            wrong += [f"{at}: rank {rank} changed {each}" for each in seen["changed"]]
    if seconds > GROUP_TIMEOUT + 60:
        wrong.append(f"{at}: took {seconds:.0f} s")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(900)  # each lost rank is noticed after some seconds
@pytest.mark.parametrize("fault", ["killed", "stopped", "fails"])
@pytest.mark.parametrize("wrapping", ["plain-3", "fsdp1-2", "fsdp2-2", "tp-2"])
def test_a_rank_is_lost(wrapping, fault):
    """A rank is lost before or after a step or a collective."""
    points = run_ranks(num_points, wrappings.world_size(wrapping), wrapping)[0]
    assert points[-1] == "after reduce" and points.count("before reduce") > 6
    step = 1 if ALL_POINTS else 12 if fault != "killed" else 3 if THOROUGH else 12
    chosen = sorted({*range(len(points) - 1, -1, -step), len(points) - 2, 0})
    # The survivors of a stopped rank only wait for a timeout: all points can be tried at once.
    with ThreadPoolExecutor(5 if fault == "stopped" else 1) as pool:
        per_point = pool.map(
            lambda point: wrong_near(wrapping, fault, point, point == len(points) - 1), chosen
        )
        wrong = [text for texts in per_point for text in texts]
    assert not wrong, "\n".join(wrong)
