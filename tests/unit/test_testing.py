"""The pool of ranks: results, failures, hangs, reuse, and other people's test files."""

import os
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distprune.testing import RankError, preload, run_ranks
from helpers.forked_scripts import environment, output_of

pytestmark = pytest.mark.slow


def sum_of_ranks(offset: int = 0) -> int:
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return int(total)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_results_come_back_in_rank_order(world_size):
    assert run_ranks(dist.get_rank, world_size) == list(range(world_size))
    expected = sum(range(world_size)) + 10 * world_size
    assert run_ranks(sum_of_ranks, world_size, offset=10) == [expected] * world_size


def nested():
    def inside():
        return None

    return inside


@pytest.mark.parametrize("fn", [lambda: None, nested()], ids=["lambda", "nested"])
def test_functions_that_cannot_travel_are_refused(fn):
    with pytest.raises(TypeError, match="Expected a function at the top level"):
        run_ranks(fn, 2)
    with pytest.raises(TypeError, match="Expected a function at the top level"):
        run_ranks(sum_of_ranks, 2, fn)
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(dist.get_rank, 0)


def process_id() -> int:
    return os.getpid()


def test_workers_are_reused_and_are_not_this_process():
    first, second = run_ranks(process_id, 2), run_ranks(process_id, 2)
    assert first == second
    assert os.getpid() not in first
    assert len(set(first)) == 2
    with pytest.raises(RuntimeError, match="comes after the first run_ranks"):
        preload("json")


def properties() -> tuple[torch.Tensor, int, float]:
    return torch.full((3,), float(dist.get_rank())), torch.get_num_threads(), float(torch.rand(()))


def test_results_travel_by_value_and_ranks_have_one_thread_and_generators_of_their_own():
    first, second = run_ranks(properties, 2)
    run_ranks(dist.get_rank, 2)  # the workers have let go of them
    assert second[0].tolist() == [1.0, 1.0, 1.0]
    assert first[1] == 1 and first[2] != second[2]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the text of the failure")
    dist.barrier()


def fail_everywhere() -> None:
    raise ValueError("the text of the failure")


def test_a_failing_rank_is_reported_with_its_traceback_and_the_others_are_killed():
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fail_on, 3, 1)
    text = str(caught.value)
    assert "rank 1 of 3: Traceback" in text
    assert "ValueError: the text of the failure" in text
    assert "in fail_on" in text
    assert "rank 0" in text and "no answer, killed" in text
    assert text.index("rank 1 of 3") < text.index("no answer")
    assert time.monotonic() - started < 20
    assert run_ranks(sum_of_ranks, 3) == [3, 3, 3]


def test_equal_failures_are_reported_once_and_the_workers_survive():
    before = run_ranks(process_id, 2)
    with pytest.raises(RankError) as caught:
        run_ranks(fail_everywhere, 2)
    assert str(caught.value).startswith("rank 0, 1 of 2: Traceback")
    assert str(caught.value).count("ValueError: the text of the failure") == 1
    assert run_ranks(process_id, 2) == before


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def test_a_hanging_rank_is_killed_at_the_deadline_and_its_stack_is_shown():
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(hang_on, 2, 0, timeout=1.0)
    assert "rank 0 of 2: no answer, killed" in str(caught.value)
    assert "in hang_on" in str(caught.value)
    assert "rank 1" not in str(caught.value)
    assert time.monotonic() - started < 20
    assert run_ranks(sum_of_ranks, 2) == [1, 1]


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def test_a_dead_rank_is_reported_with_its_exit_code():
    with pytest.raises(RankError, match=r"rank 1 of 2: died \(exit code 3\)"):
        run_ranks(die_on, 2, 1)
    assert run_ranks(sum_of_ranks, 2) == [1, 1]


def mesh_coordinate() -> tuple[int, ...]:
    """The coordinate that a *result* of a DTensor operation believes to have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)
    assert (tensor + 1).device_mesh is mesh
    return tuple((tensor + 1).device_mesh.get_coordinate())


def test_no_mesh_of_an_earlier_call_is_handed_out():
    for _ in range(3):
        assert run_ranks(mesh_coordinate, 2) == [(0,), (1,)]


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def leave_work_behind() -> int:
    """Collectives that nobody waits for, and a reducer in a reference cycle that has the group."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    model.itself = model
    for _ in range(8):
        dist.all_reduce(torch.zeros(4_000_000), async_op=True)
    return dist.get_rank()


def test_work_that_was_not_waited_for_does_not_hang_the_next_call():
    for _ in range(3):
        assert run_ranks(leave_work_behind, 2, timeout=60) == [0, 1]


def leave_threads(number: int) -> int:
    """Threads that never end, such as torch 2.11 keeps of every group that had a DTensor."""
    for _ in range(number):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_workers_with_many_threads_are_replaced():
    first = run_ranks(leave_threads, 2, 5)
    assert run_ranks(leave_threads, 2, 100) == first
    assert not {*first} & {*run_ranks(process_id, 2)}
    assert max(run_ranks(num_threads, 2)) < 20


USER_TESTS = """
import pytest
import torch.distributed as dist
from distprune.testing import run_ranks
from .helper import VALUE

class Given:
    def __init__(self, value): self.value = value

def total(given):
    return given.value + dist.get_rank() + VALUE

@pytest.mark.parametrize("world_size", [1, 2])
def test_passes(world_size):
    assert run_ranks(total, world_size, Given(10)) == [17, 18][:world_size]

def broken(which):
    if dist.get_rank() == which:
        assert which == 17, "what the rank had to say"

def test_fails():
    run_ranks(broken, 2, 1)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_in_somebody_elses_project(tmp_path):
    """Two workers of xdist; test files under names that only pytest can import."""
    folder = tmp_path / "my checks" / "inner"
    folder.mkdir(parents=True)
    folder.joinpath("__init__.py").touch()
    folder.joinpath("helper.py").write_text("VALUE = 7")
    for letter in "ab":
        folder.joinpath(f"test_{letter}.py").write_text(USER_TESTS)
    options = ["-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "--import-mode=importlib", "my checks"]
    text = output_of(*command, code=1, cwd=tmp_path, env=environment())
    assert "2 failed, 4 passed" in text, text
    assert text.count("AssertionError: what the rank had to say") >= 2
