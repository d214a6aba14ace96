"""``prune`` and ``apply``, whatever happens: no result or the whole one, with the same bytes."""

import errno
import fcntl
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distprune.files import disk, planning, pruning, team
from distprune.files.checkpoint import open_checkpoint
from distprune.files.disk import discard, locked
from distprune.files.errors import CheckpointError, FilesError, NaNError, OutputError, RanksError
from distprune.testing import RankError, run_ranks
from helpers.disk_crashes import Steps, disk_is_full, kill_self, run_forked
from helpers.recipes import raw_recipe
from helpers.sampling import THOROUGH, every
from helpers.tiny_checkpoints import save, save_in_files, tree_digest

RUN = ("distprune/report.json",)
WAYS = {
    "global": raw_recipe(0.5),
    "layer": raw_recipe(0.5, "layer"),
    "pattern": raw_recipe(pattern="2:4"),
    "apply": None,
}


@pytest.fixture
def source(tmp_path):
    """Four weight files with many ties."""
    g = torch.Generator().manual_seed(0)
    shapes = {f"layers.{n}.weight": (16, 40) for n in range(6)} | {"norm.weight": (100,)}
    tensors = {n: (torch.randn(s, generator=g) * 8).round().bfloat16() for n, s in shapes.items()}
    return save_in_files(tmp_path / "source", tensors, 2, 3, 6)


def prune(source, target, way="global", **kwargs):
    if way == "apply":
        masks = source.with_name("masks")
        if not masks.exists():
            prune(source, masks)
        return pruning.apply(masks, open_checkpoint(source), target, **kwargs)
    return pruning.prune(planning.plan(source, WAYS[way]), target, **kwargs)


def undisturbed(source, way="global"):
    """The digest of what has to come out, and how many calls change the disk."""
    target = source.with_name("undisturbed")
    prune(source, target, way)
    shutil.rmtree(target)
    with Steps() as steps:
        prune(source, target, way)
    return tree_digest(target, RUN), steps.count


def killed_at(step, source, target, way):
    with Steps(step, kill_self):
        prune(source, target, way)


class Stop(Exception):
    pass


def stopped(source, target, way="global", at=1):
    """A run that stops when it has finished some weight files."""

    def stop(state):
        if len([*target.with_name("target.partial").glob("*.safetensors")]) >= at:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "_SECONDS", 0.0)
        with pytest.raises((Stop, FilesError), match=r"Stop|^$"):
            prune(source, target, way, progress=stop)


def beside(target):
    return {path.name for path in target.parent.iterdir()} - {"source", "masks", "undisturbed"}


@pytest.mark.parametrize("way", every(3, WAYS))
def test_killed_at_any_step_it_goes_on_and_ends_the_same(source, tmp_path, way):
    wanted, num_steps = undisturbed(source, way)
    before, target = tree_digest(source), tmp_path / "target"
    middle = random.Random(way).sample(range(6, num_steps - 12), 12 if THOROUGH else 5)
    last = every(2, range(num_steps - 12, num_steps + 1))
    for step in (1, 2, 3, *middle, *last):
        status = run_forked(killed_at, step, source, target, way)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, step
        prune(source, target, way)
        assert tree_digest(target, RUN) == wanted, step
        assert beside(target) == {"target"}, step
        run_forked(shutil.rmtree, target)
    assert tree_digest(source) == before


def test_finished_files_are_kept_and_others_begun_again(source, tmp_path):
    wanted, _ = undisturbed(source)
    target, partial = tmp_path / "target", tmp_path / "target.partial"
    stopped(source, target)
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    (partial / "model-00004-of-00004.safetensors.part").write_text("half")
    assert finished
    prune(source, target)
    assert all((target / name).stat().st_mtime_ns == changed for name, changed in finished.items())
    assert tree_digest(target, RUN) == wanted


@pytest.mark.parametrize("name", ["write", "fsync", "rename"])
def test_a_full_disk_is_told_and_survived(source, tmp_path, name):
    wanted, _ = undisturbed(source)
    with Steps(names=(name,)) as steps:
        prune(source, tmp_path / "counted")
    for step in {1, steps.count // 2 or 1, steps.count - 1 or 1}:
        target = tmp_path / f"target{step}"
        with Steps(step, disk_is_full, (name,)) as steps, pytest.raises(OutputError) as error:
            prune(source, target)
        assert steps.has_acted and "No space left" in str(error.value)
        assert not list(tmp_path.glob("target*/*.part")), "it would take the room"
        if not target.exists():
            prune(source, target)
        assert tree_digest(target, RUN) == wanted


def test_too_little_room_is_found_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1000)
    with pytest.raises(OutputError, match="more bytes"):
        prune(source, tmp_path / "target")
    assert not list(tmp_path.glob("target*"))


def outcome(source, target, way="global"):
    """What a run says, by kind and text."""
    try:
        prune(source, target, way)
        return "done", ""
    except FilesError as error:
        return type(error).__name__, str(error)


def on_one_rank_and_on_two(*arguments):
    return [outcome(*arguments), *run_ranks(outcome, 2, *arguments)]


def test_a_finished_result_is_success_and_is_left_as_it_is(source, tmp_path):
    target = tmp_path / "target"
    for way in ("global", "apply"):
        first = prune(source, target, way)
        before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
        said = []
        assert prune(source, target, way, tell=said.append) == first
        assert said == [f"{target} is finished: this command made it before. Nothing was changed."]
        assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
        assert run_ranks(outcome, 2, source, target, way) == [("done", "")] * 2
        shutil.rmtree(target)


def test_any_other_destination_that_exists_is_an_error(source, tmp_path):
    target = tmp_path / "target"

    def another_source():
        os.utime(source / "config.json", ns=(1, 1))

    changes = [
        lambda: None,
        another_source,
        lambda: (target / "distprune/report.json").write_text("[]"),
    ]
    prune(source, target)
    for way, change in zip(["layer", "global", "global"], changes, strict=True):
        change()
        before = tree_digest(target)
        with pytest.raises(OutputError, match="expected a new name"):
            prune(source, target, way)
        assert tree_digest(target) == before and beside(target) == {"target"}


def test_another_recipe_or_source_does_not_take_up_what_is_unfinished(source, tmp_path):
    target = tmp_path / "target"
    stopped(source, target)
    before = tree_digest(tmp_path / "target.partial")
    for kind, text in on_one_rank_and_on_two(source, target, "layer"):
        assert kind == "OutputError" and "unfinished result" in text
    os.utime(source / "config.json", ns=(1, 1))
    with pytest.raises(OutputError, match="unfinished result"):
        prune(source, target)
    assert tree_digest(tmp_path / "target.partial") == before


def test_discard_removes_what_is_left_and_nothing_else(source, tmp_path):
    target = tmp_path / "target"
    stopped(source, target)
    for name in ("target.partial-mine", "target.partial.bak", "targets"):
        (tmp_path / name).mkdir()
    (tmp_path / "target.partial-text").mkdir()
    with locked(target), pytest.raises(OutputError, match="at work"):
        discard(target)
    assert discard(target) == [tmp_path / "target.partial", tmp_path / "target.partial-text"]
    assert beside(target) == {"target.partial-mine", "target.partial.bak", "targets"}
    assert discard(target) == []
    prune(source, target)
    before = tree_digest(target)
    assert discard(target) == [] and tree_digest(target) == before


def test_destinations_that_are_refused(source, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (tmp_path / "link").symlink_to(source, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = tree_digest(source)
    for target, text in {
        taken: "exists",
        source: "inside the source",
        tmp_path / "dangling": "exists",
        source / "inside": "inside the source",
        tmp_path / "link" / "inside": "inside the source",
        tmp_path / "none" / "target": "is not a folder",
        Path("/"): "is not a folder",
    }.items():
        for kind, words in on_one_rank_and_on_two(source, target):
            assert kind == "OutputError" and text in words
    assert tree_digest(source) == before
    assert beside(taken) == {"taken", "link", "dangling"}


def test_a_destination_that_appears_during_the_run_is_not_replaced(source, tmp_path):
    target = tmp_path / "target"
    with Steps(20, target.mkdir) as steps, pytest.raises(OutputError, match="exists"):
        prune(source, target)
    assert steps.has_acted and not list(target.iterdir())
    target.rmdir()
    prune(source, target)


def test_a_file_has_its_name_once_it_is_on_the_disk(source, tmp_path, monkeypatch):
    """A loss of power cannot be made here; the order of syncs can be seen."""
    fsync, rename, seen = os.fsync, os.rename, []

    def synced(descriptor):
        seen.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def renamed(old, new):
        seen.append(("rename", os.path.basename(new)))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    prune(source, tmp_path / "target")
    for path in source.iterdir():
        at = seen.index(("rename", path.name))
        assert ("sync", f"{path.name}.part") in seen[:at]
    for name in sorted(p.name for p in source.glob("*.safetensors")):
        of_file = seen.index(("rename", name))
        assert seen.index(("rename", f"{name}.json")) < of_file
        assert seen.index(("rename", f"{name}.masks")) < of_file
    published = seen.index(("rename", "target"))
    assert seen.index(("rename", "report.json")) < published
    assert seen[published + 1 :] == [("sync", tmp_path.name)]


def test_a_source_that_changes_is_an_error(source, tmp_path):
    path = source / "model-00002-of-00004.safetensors"

    def rewrite():
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(5, 5))

    for change in (lambda: os.truncate(path, path.stat().st_size - 1), rewrite):
        plan = planning.plan(source, WAYS["global"])
        whole = path.read_bytes()
        change()
        with pytest.raises(CheckpointError, match=r"truncated|ends at|has changed"):
            pruning.prune(plan, tmp_path / "target")
        assert not (tmp_path / "target").exists()
        path.write_bytes(whole)
        discard(tmp_path / "target")
    prune(source, tmp_path / "masks")
    masks = tmp_path / "masks/distprune/masks.safetensors"
    with (
        Steps(20, lambda: os.utime(masks, ns=(1, 1))),
        pytest.raises(CheckpointError, match=r"masks\.safetensors has changed"),
    ):
        prune(source, tmp_path / "target", "apply")


def test_ranks_that_were_called_differently(source, tmp_path):
    texts = run_ranks(called_differently, 2, source, tmp_path / "target")
    assert all("recipe.sparsity" in text and "0.25" in text for text in texts)
    assert not list(tmp_path.glob("target*"))


def called_differently(source, target):
    plan = planning.plan(source, raw_recipe(0.5 if dist.get_rank() == 0 else 0.25))
    with pytest.raises(RanksError) as error:
        pruning.prune(plan, target)
    return str(error.value)


def test_an_error_on_one_rank_is_that_of_all(source, tmp_path):
    found = run_ranks(cannot_write_on_rank_one, 3, source, tmp_path / "target")
    assert all(kind == "OutputError" for kind, _ in found)
    assert all("on rank 1" in text for _, text in found)
    assert run_ranks(outcome, 2, source, tmp_path / "target") == [("done", "")] * 2


def cannot_write_on_rank_one(source, target):
    def fails():
        raise OSError(5, "Input/output error")

    with Steps(2 if dist.get_rank() == 1 else 0, fails, ("write",)):
        return outcome(source, target)


@pytest.mark.parametrize("name", every(2, ["write", "fsync"], 1))
def test_a_lost_rank_is_noticed_and_the_rest_done_later(source, tmp_path, name):
    wanted, _ = undisturbed(source)
    target, told = tmp_path / "target", tmp_path / "told"
    with pytest.raises(RankError, match="rank 1"):
        run_ranks(losing_rank_one, 3, source, target, told, name)
    assert {(tmp_path / f"told{rank}").read_text() for rank in (0, 2)} == {"RanksError"}
    assert not target.exists() and not (tmp_path / "told1").exists()
    assert run_ranks(outcome, 2, source, target) == [("done", "")] * 2
    assert tree_digest(target, RUN) == wanted


def losing_rank_one(source, target, told, name):
    rank = dist.get_rank()
    with Steps(2 if rank == 1 else 0, lambda: os._exit(3), (name,)):
        kind, _ = outcome(source, target)
    told.with_name(f"told{rank}").write_text(kind)


def stopped_on_every_rank(source, target):
    stopped(source, target, at=2 if dist.get_rank() == 2 else 9)


def test_a_run_that_was_stopped_goes_on_with_any_number_of_ranks(source, tmp_path):
    wanted, _ = undisturbed(source)
    target = tmp_path / "target"
    stopped(source, target)
    run_ranks(stopped_on_every_rank, 3, source, target)
    done = sum(path.stat().st_size for path in (tmp_path / "target.partial").glob("*.safetensors"))
    assert done
    said, seen = [], []
    prune(source, target, tell=said.append, progress=seen.append)
    assert len(said) == 1 and said[0].startswith("Resuming: ")
    for phase in ("count", "write"):
        states = [state for state in seen if state.phase == phase]
        numbers = [state.num_done for state in states]
        assert numbers == sorted(numbers) and numbers[-1] == states[0].total
        assert phase == "count" or numbers[0] > done
    assert tree_digest(target, RUN) == wanted


def test_a_run_that_makes_nothing_leaves_nothing(source, tmp_path):
    target = tmp_path / "target"
    for name in ("mkdir", "write"):
        with Steps(1, disk_is_full, (name,)), pytest.raises(OutputError):
            prune(source, target)
        assert run_forked(killed_at, 1, source, target, "global") != 0
        prune(source, target, "pattern")
        shutil.rmtree(target)
    bad = torch.ones(16, 40)
    bad[3, 3] = float("nan")
    nan = save(tmp_path / "nan", {"layers.0.weight": torch.ones(16, 40)}, {"layers.1.weight": bad})
    for way in ("global", "layer", "pattern"):
        with pytest.raises(NaNError):
            prune(nan, target, way)
        assert beside(target) == {"nan"}
    os.truncate(source / "model-00001-of-00004.safetensors", 400)
    with pytest.raises(CheckpointError):
        prune(source, target)
    assert beside(target) == {"nan"}


def test_one_run_at_a_time_has_the_lock(tmp_path, monkeypatch):
    target = tmp_path / "target"

    def second():
        with pytest.raises(OutputError, match=r"at work.*partial\.lock"), locked(target):
            pass

    def take_and_die():
        with locked(target):
            os._exit(7)

    with locked(target):
        second()
        assert run_forked(second) == 0
    assert run_forked(take_and_die) != 0
    with locked(target):
        pass
    assert not list(tmp_path.iterdir())

    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)  # a file system without locks
    with locked(target), locked(target):
        pass


def test_two_runs_on_one_destination(source, tmp_path):
    target = tmp_path / "target"

    def second():
        with pytest.raises(OutputError, match="another process is at work"):
            prune(source, target)

    statuses = []
    with Steps(20, lambda: statuses.append(run_forked(second))):
        prune(source, target)
    assert statuses == [0] and beside(target) == {"target"}
