"""Links where the output is written are never followed."""

import shutil
import stat

import pytest
import torch

from distprune.files import planning, pruning
from distprune.files.errors import Interrupted, OutputError
from distprune.files.partial import Partial, discard
from distprune.files.recipe import FileRecipe
from helpers.tiny_checkpoints import save

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


@pytest.mark.parametrize(
    "name", ["model.safetensors", "distprune", "distprune/work", "distprune/work/decision.json.new"]
)
def test_a_link_in_an_unfinished_result(source, target, victim, unfinished, name):
    path = unfinished / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.symlink_to(victim.parent if path.suffix == "" else victim)
    with pytest.raises(OutputError, match=f"{name} is a link"):
        prune(source, target)
    assert not target.exists()
    discard(target)
    prune(source, target)


def test_a_link_in_place_of_the_unfinished_result(source, target, victim, unfinished):
    shutil.rmtree(unfinished)
    unfinished.symlink_to(victim.parent)
    for function in (prune, lambda _, target: discard(target)):
        with pytest.raises(OutputError, match="is a link"):
            function(source, target)
    assert not target.exists()


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
    with pytest.raises(OutputError, match="symbolic links"):
        prune(source, target)
