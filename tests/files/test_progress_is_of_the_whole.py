"""One progress for a whole run, whose rate and rest are right after a resume and in any pass."""

import pytest
import torch

from distprune.files import planning, pruning, team
from distprune.files.errors import Interrupted
from distprune.files.recipe import FileRecipe
from distprune.files.team import Progress, Team
from distprune.ranks.process_groups import world
from helpers.tiny_checkpoints import save

GB = 10**9


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(team.time, "monotonic", clock)
    return clock


def steps(clock, num_bytes, per_second):
    """A gigabyte at a time, at that speed."""
    for _ in range(num_bytes // GB):
        clock.now += GB / per_second
        yield GB


def work(crew, steps, phase, num_done, total_bytes):
    crew.begin(phase, total_bytes, num_done)
    crew.work(steps)


def test_bytes_of_an_earlier_run_are_not_in_the_rate(clock):
    seen = []
    crew = Team(world(), seen.append)
    work(crew, steps(clock, 10 * GB, GB), "write", 18 * GB, 28 * GB)
    assert all(state.bytes_per_second == pytest.approx(GB) for state in seen)
    assert [state.num_bytes for state in seen] == [GB * n for n in (*range(19, 29), 28)]
    assert seen[0].seconds_left == pytest.approx(9)


def test_later_passes_begin_anew(clock):
    """The bytes of the passes before are done, but were not read in no time."""
    seen = []
    crew = Team(world(), seen.append)
    for done in (0, 10, 20):
        work(crew, steps(clock, 10 * GB, GB), "count", done * GB, 30 * GB)
        clock.now += 500  # in which the ranks wait for one another
    assert all(state.bytes_per_second == pytest.approx(GB) for state in seen)
    assert seen[-2].seconds_left == pytest.approx(0)
    assert seen[11].num_bytes == 11 * GB and seen[11].seconds_left == pytest.approx(19)


def test_all_phases_are_one_whole(clock):
    seen = []
    crew = Team(world(), seen.append)
    crew.expect("count", 10 * GB)
    crew.expect("write", 12 * GB, 4 * GB)
    work(crew, steps(clock, 10 * GB, GB), "count", 0, 10 * GB)
    assert seen[0] == Progress("count", 5 * GB, 22 * GB, GB)
    assert seen[0].seconds_left == pytest.approx(17)
    work(crew, steps(clock, 8 * GB, GB), "write", 4 * GB, 12 * GB)
    done = [state.num_bytes for state in seen]
    assert done == sorted(done) and done[-1] == 22 * GB
    assert {state.total_bytes for state in seen} == {22 * GB}


def test_what_turns_out_to_be_damaged_is_work_again(clock):
    seen = []
    crew = Team(world(), seen.append)
    crew.expect("write", 12 * GB, 4 * GB)
    work(crew, steps(clock, 9 * GB, GB), "write", 3 * GB, 12 * GB)
    assert seen[0].num_bytes == 4 * GB and seen[-1].num_bytes == 12 * GB


def test_the_rate_is_that_of_the_last_half_minute(clock):
    seen = []
    crew = Team(world(), seen.append)

    def slowing_down():
        yield from steps(clock, 600 * GB, 10 * GB)
        yield from steps(clock, 40 * GB, GB)

    work(crew, slowing_down(), "write", 0, 1000 * GB)
    assert seen[-1].bytes_per_second == pytest.approx(GB, rel=0.05)
    assert seen[-1].seconds_left == pytest.approx(360, rel=0.05)


def test_a_rate_keeps_little(clock):
    seen = []
    crew = Team(world(), seen.append)
    work(crew, steps(clock, 10_000 * GB, 2 * GB), "write", 0, 10_000 * GB)
    assert len(crew._samples) < 70
    assert seen[-1].bytes_per_second == pytest.approx(2 * GB)


@pytest.mark.parametrize("way", [FileRecipe(0.5), FileRecipe(pattern="2:4")])
def test_a_pruning_counts_up_to_the_end_before_and_after_a_stop(tmp_path, monkeypatch, way):
    monkeypatch.setattr(team, "_ROUND_SECONDS", 1e-4)
    g = torch.Generator().manual_seed(0)
    tensors = {f"layers.{n}.weight": torch.randn(16, 40, generator=g) for n in range(6)}
    plan = planning.plan(save(tmp_path / "source", tensors), way)
    seen = []

    def check():
        done = [state.num_bytes for state in seen]
        (total,) = {state.total_bytes for state in seen}
        assert done == sorted(done) and done[-1] == total
        seen.clear()

    pruning.prune(plan, tmp_path / "straight", progress=seen.append)
    check()
    with pytest.raises(Interrupted):
        pruning.prune(
            plan,
            tmp_path / "target",
            stop=lambda: any(each.num_bytes > 0.8 * each.total_bytes for each in seen),
            progress=seen.append,
        )
    seen.clear()
    pruning.prune(plan, tmp_path / "target", progress=seen.append)
    check()
