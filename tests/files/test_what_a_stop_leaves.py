"""What an interrupted run leaves on disk, its message, and what the next command does."""

import json
import os
import re

import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.disk.destination import Lock
from distprune.files.errors import CheckpointError, Interrupted, NaNError, OutputError
from distprune.files.partial import discard
from distprune.files.recipe import FileRecipe
from distprune.testing import run_ranks
from helpers.disk_crashes import Steps, disk_is_full, stop_after
from helpers.small_work_units import small_units
from helpers.tiny_checkpoints import save, tree_digest

RUN = ("distprune/run.json",)


@pytest.fixture(autouse=True)
def many_small_units():
    with small_units():
        yield


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", made())


def made():
    g = torch.Generator().manual_seed(0)
    return {f"layers.{n}.weight": torch.randn(16, 40, generator=g) for n in range(6)}


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


def prune(source, target, **kwargs):
    return pruning.prune(planning.plan(source, FileRecipe(0.5)), target, **kwargs)


def stopped(source, target, after=30):
    """The error of a run that stops after so many steps."""
    with pytest.raises(Interrupted) as error:
        prune(source, target, stop=stop_after(after))
    return str(error.value)


def names(target):
    return {path.name for path in target.parent.iterdir()}


def test_a_stop_says_what_is_left_and_how_to_go_on_or_give_up(source, target):
    text = stopped(source, target)
    (folder,) = target.parent.glob("target.partial-*")
    found = re.fullmatch(
        r"stopped as asked\. (\S+) keeps the finished part, (\S+ k?B) of (\S+ kB), and takes \S+ "
        r"kB of the disk: run the same command again to resume, or add --discard to that command "
        r"to remove it\.",
        text,
    )
    assert found and found[1] == str(folder) and found[2] != "0 B" and found[3] == "16.0 kB"


def test_a_resumed_run_says_what_is_done_already(source, target):
    done = re.search(r"part, (\S+ \S+) of (\S+ \S+),", stopped(source, target))
    said = []
    prune(source, target, tell=said.append)
    assert said == [f"Resuming: {done[1]} of {done[2]} are finished."]


def test_a_resumed_run_says_what_was_damaged(source, target):
    stopped(source, target, 35)
    (folder,) = target.parent.glob("target.partial-*")
    os.truncate(folder / "model.safetensors", 0)
    said = []
    prune(source, target, tell=said.append)
    assert len(said) == 2 and re.match(r"\d+ finished parts are missing or damaged", said[1])


def test_a_first_run_says_nothing(source, target):
    said = []
    prune(source, target, tell=said.append)
    assert said == []


@pytest.mark.parametrize(
    ("name", "steps"),
    [("mkdir", (1, 2)), ("write", (1,)), ("pwrite", (1,))],
)
def test_a_run_that_never_began_leaves_nothing(source, target, name, steps):
    for step in steps:
        with Steps(step, disk_is_full, (name,)), pytest.raises(OutputError):
            prune(source, target)
        assert names(target) == {"source"}


def test_a_stop_before_anything_is_done_leaves_nothing(source, target):
    assert "Nothing was left on the disk." in stopped(source, target, 0)
    assert names(target) == {"source"}


def test_a_source_that_cannot_be_read_leaves_nothing(source, target):
    plan = planning.plan(source, FileRecipe(0.5))
    os.truncate(source / "model.safetensors", 9000)
    with pytest.raises(CheckpointError, match="truncated"):
        pruning.prune(plan, target)
    assert names(target) == {"source"}


def test_what_would_fail_again_leaves_nothing(tmp_path, target):
    tensors = made()
    tensors["layers.5.weight"][3, 3] = float("nan")
    with pytest.raises(NaNError, match=r"Nothing was left on the disk\.$"):
        prune(save(tmp_path / "source", tensors), target)
    assert names(target) == {"source"}


def test_a_full_disk_says_what_is_left(source, target):
    with Steps(20, disk_is_full, ("pwrite",)), pytest.raises(OutputError) as error:
        prune(source, target)
    assert "No space left" in str(error.value) and "--discard" in str(error.value)


def test_a_finished_result_is_success_and_is_left_as_it_is(source, target, monkeypatch):
    first = prune(source, target)
    before = {path: path.stat() for path in target.rglob("*")}
    said = []
    parent = os.stat(target.parent).st_mtime_ns
    again = prune(source, target, tell=said.append)
    assert again == first
    assert said == [f"{target} is finished: this command made it before. Nothing was changed."]
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == {
        path: info.st_mtime_ns for path, info in before.items()
    }
    assert os.stat(target.parent).st_mtime_ns == parent


@small_units()
def num_pruned(source, target):
    return prune(source, target).num_pruned


def test_a_finished_result_is_success_on_all_ranks(source, target):
    assert run_ranks(num_pruned, 3, source, target) == [1920] * 3
    assert run_ranks(num_pruned, 2, source, target) == [1920] * 2


def another_recipe(source, target):
    return planning.plan(source, FileRecipe(0.25))


def another_source(source, target):
    os.utime(source / "config.json", ns=(1, 1))
    return planning.plan(source, FileRecipe(0.5))


def a_short_file(source, target):
    os.truncate(target / "model.safetensors", 100)
    return planning.plan(source, FileRecipe(0.5))


def a_lost_file(source, target):
    (target / "distprune/masks.safetensors").unlink()
    return planning.plan(source, FileRecipe(0.5))


def no_report(source, target):
    (target / "distprune/report.json").write_text("[]")
    return planning.plan(source, FileRecipe(0.5))


def not_complete(source, target):
    path = target / "distprune/report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "begun"}))
    return planning.plan(source, FileRecipe(0.5))


@pytest.mark.parametrize(
    "change",
    [another_recipe, another_source, a_short_file, a_lost_file, no_report, not_complete],
)
def test_any_other_destination_that_exists_is_an_error(source, target, change):
    prune(source, target)
    plan = change(source, target)
    before = tree_digest(target)
    with pytest.raises(OutputError, match="expected a new name"):
        pruning.prune(plan, target)
    assert tree_digest(target) == before and names(target) == {"source", "target"}


def test_discard_removes_what_is_left_and_nothing_else(source, target, tmp_path):
    stopped(source, target)
    kept = {"target.partial-mine", "target.partial-0123456789abcdef.bak", "targets"}
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / "target.partial-0123456789abcdef.work").mkdir()
    removed = discard(target)
    assert len(removed) == 2 and sum(num_bytes for _, num_bytes in removed) > 10_000
    assert names(target) == {"source"} | kept
    assert discard(target) == []


def test_discard_leaves_a_finished_result_alone(source, target):
    prune(source, target)
    before = tree_digest(target)
    assert discard(target) == [] and tree_digest(target) == before


def test_discard_waits_for_no_one_at_work(source, target):
    stopped(source, target)
    before = names(target)
    lock = Lock(target)
    lock.acquire()
    with pytest.raises(OutputError, match="at work"):
        discard(target)
    lock.release()
    assert names(target) == before
    with pytest.raises(OutputError, match="unfinished result of another"):
        pruning.prune(planning.plan(source, FileRecipe(0.25)), target)
    assert len(discard(target)) == 1
