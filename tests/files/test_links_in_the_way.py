"""Links, hard links, pipes and other users' folders where the output is written: never followed."""

import os
import shutil
import stat

import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.errors import Interrupted, OutputError
from distprune.files.partial import Partial, discard
from distprune.files.recipe import FileRecipe
from helpers.disk_crashes import run_forked
from helpers.tiny_checkpoints import save, tree_digest

VICTIM = b"precious" * 1000


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    return save(tmp_path / "source", {"layers.0.weight": torch.randn(16, 16), "b": torch.ones(4)})


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "elsewhere" / "victim"
    path.parent.mkdir()
    path.write_bytes(VICTIM)
    yield path
    assert path.read_bytes() == VICTIM
    assert [each.name for each in path.parent.iterdir()] == ["victim"]


@pytest.fixture
def target(tmp_path):
    return tmp_path / "target"


def prune(source, target):
    return pruning.prune(planning.plan(source, FileRecipe(0.5)), target)


def stop(*_):
    raise Interrupted("here")


@pytest.fixture
def unfinished(source, target):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Partial, "complete", stop)
        prune(source, target)
    (folder,) = target.parent.glob("target.partial-*")
    return folder


def soft(victim, path):
    path.symlink_to(victim)


def hard(victim, path):
    os.link(victim, path)


def pipe(victim, path):
    os.mkfifo(path)


WAYS = {soft: "is a link to", hard: "has 2 hard links", pipe: "is not a regular file"}


@pytest.mark.parametrize("way", WAYS)
def test_in_place_of_the_lock(source, target, victim, way):
    path = target.with_name("target.partial.lock")
    way(victim, path)
    with pytest.raises(OutputError, match=rf"target\.partial\.lock {WAYS[way]}"):
        prune(source, target)
    path.unlink()
    prune(source, target)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "distprune/masks.safetensors",
        "distprune/recipe.yaml",
        "distprune/report.json.new",
        "distprune/work/decision.json",
        "distprune/work/done-0000-0000.jsonl",
        "distprune/work/done-0001-0000.jsonl",
        "distprune/work/decision.json.new",
    ],
)
def test_in_place_of_a_file(source, target, victim, unfinished, way, name):
    (unfinished / name).unlink(missing_ok=True)
    way(victim, unfinished / name)
    with pytest.raises(OutputError, match=f"{name} {WAYS[way]}"):
        prune(source, target)
    assert not target.exists()
    discard(target)
    prune(source, target)


@pytest.mark.parametrize("name", ["", "distprune", "distprune/work"])
def test_in_place_of_a_folder(source, target, victim, unfinished, name):
    path = unfinished / name
    shutil.rmtree(path)
    path.symlink_to(victim.parent)
    with pytest.raises(OutputError, match="is a link to"):
        prune(source, target)
    assert not target.exists()


def test_a_link_to_nothing_makes_no_file(source, target, tmp_path):
    target.with_name("target.partial.lock").symlink_to(tmp_path / "made")
    with pytest.raises(OutputError, match="is a link to"):
        prune(source, target)
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "distprune"])
def test_a_folder_of_another_user(source, target, unfinished, name):
    os.chown(unfinished / name, 12345, -1)
    with pytest.raises(OutputError, match=r"belongs to another user \(uid 12345"):
        prune(source, target)
    assert not target.exists()
    if not name:
        with pytest.raises(OutputError, match="another user"):
            discard(target)
        assert unfinished.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_lock_of_another_user(source, target):
    path = target.with_name("target.partial.lock")
    path.touch()
    os.chown(path, 12345, -1)
    with pytest.raises(OutputError, match=r"belongs to another user \(uid 12345"):
        prune(source, target)
    assert path.read_bytes() == b""


def test_where_all_files_are_shown_as_another_user_s(source, target, unfinished, monkeypatch):
    """As a server does that maps root to nobody."""
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    prune(source, target)
    assert {each.name for each in target.parent.iterdir()} == {"source", "target"}


def test_unfinished_results_are_their_owner_s_alone_and_finished_ones_as_new_folders(
    source, target, unfinished
):
    assert stat.S_IMODE(unfinished.stat().st_mode) == 0o700
    prune(source, target)
    (target.parent / "new").mkdir()
    assert target.stat().st_mode == (target.parent / "new").stat().st_mode


def test_a_link_that_appears_during_the_run_is_not_followed(source, target, victim, monkeypatch):
    allocate = Partial._allocate

    def and_link(self):
        allocate(self)
        for name in ("model.safetensors", "config.json", "distprune/masks.safetensors"):
            (self.folder / name).unlink()
            (self.folder / name).symlink_to(victim)

    monkeypatch.setattr(Partial, "_allocate", and_link)
    with pytest.raises(OutputError, match="It is a link, which is not followed"):
        prune(source, target)


def test_what_was_discarded_leaves_the_same_result(source, target, unfinished, tmp_path):
    assert run_forked(prune, source, tmp_path / "straight") == 0
    assert [path for path, _ in discard(target)] == [str(unfinished)]
    prune(source, target)
    run = ("distprune/run.json",)
    assert tree_digest(target, run) == tree_digest(tmp_path / "straight", run)
