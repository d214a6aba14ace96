"""Names, links and permissions of sources and destinations; no copy is less private."""

import os

import pytest
import torch

from distprune.files.checkpoint import open_checkpoint
from distprune.files.errors import CheckpointError, OutputError
from distprune.files.planning import plan
from distprune.files.pruning import apply, prune
from helpers import tiny_checkpoints
from helpers.permissions import without_root_privileges
from helpers.recipes import raw_recipe
from helpers.tiny_checkpoints import tree_digest

# Links


WEIGHTS = {"layers.0.weight": torch.randn(8, 8).bfloat16()}


@pytest.fixture
def source(tmp_path):
    return tiny_checkpoints.save(tmp_path / "source", WEIGHTS)


@pytest.mark.parametrize("name", ["merges.txt", "model.safetensors", "extra"])
def test_a_link_is_read_like_what_it_points_to(source, name, tmp_path):
    (source / "extra").mkdir()
    (source / "extra" / "a.txt").write_text("a")
    (source / "merges.txt").write_text("b")
    prune(plan(source, raw_recipe(0.5)), tmp_path / "expected")
    (source / name).rename(tmp_path / "elsewhere")
    (tmp_path / "between").symlink_to(tmp_path / "elsewhere")
    (source / name).symlink_to("../between")
    prune(plan(source, raw_recipe(0.5)), tmp_path / "target")
    result, expected = (
        tree_digest(tmp_path / folder, leave_out=["distprune/report.json"])
        for folder in ("target", "expected")
    )
    assert result == expected
    assert not any(path.is_symlink() for path in (tmp_path / "target").rglob("*"))


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder):
    found = {str(p.relative_to(folder)): p.stat().st_mode & 0o7777 for p in folder.rglob("*")}
    return found | {"": folder.stat().st_mode & 0o7777}


@pytest.mark.parametrize("how", ["prune", "apply"])
def test_copies_take_the_permissions_of_the_source(source, tmp_path, umask, how):
    (source / "code").mkdir(mode=0o700)
    (source / "code" / "run.sh").write_text("#!/bin/sh\n")
    (source / "code" / "run.sh").chmod(0o4777)
    (source / "config.json").chmod(0o600)
    (source / "model.safetensors").chmod(0o640)
    (source / "tokenizer.json").chmod(0o444)
    source.chmod(0o750)
    target = tmp_path / "target"
    if how == "prune":
        prune(plan(source, raw_recipe(0.5)), target)
    else:
        prune(plan(source, raw_recipe(0.5)), tmp_path / "masks")
        apply(tmp_path / "masks", open_checkpoint(source), target)
    found = modes(target)
    assert {name: found[name] for name in modes(source)} == {
        "": 0o755, "code": 0o755, "code/run.sh": 0o755, "config.json": 0o600,
        "model.safetensors": 0o640, "tokenizer.json": 0o644,
    }  # fmt: skip
    assert found["distprune/masks.safetensors"] == 0o640


# Names and places


def refuse(source):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    return str(error.value)


@pytest.fixture(params=["prune", "apply"])
def write(request, source, tmp_path):
    """Write a result to a place; it raises OutputError, and leaves nothing."""
    made = plan(source, raw_recipe(0.5))
    prune(made, tmp_path / "masks")
    checkpoint = open_checkpoint(source)

    def call(place):
        before = sorted(os.listdir(tmp_path))
        try:
            if request.param == "apply":
                apply(tmp_path / "masks", checkpoint, place)
            else:
                prune(made, place)
        except OutputError as error:
            assert sorted(os.listdir(tmp_path)) == before
            assert "\n" not in str(error)
            return str(error)
        return ""

    return call


def test_the_root_is_no_destination(write):
    assert "is not a folder" in write("/")


def test_a_destination_in_a_folder_that_may_not_be_written_or_entered(write, tmp_path):
    (tmp_path / "closed").mkdir()
    for mode in (0o555, 0o444):
        (tmp_path / "closed").chmod(mode)
        with without_root_privileges():
            text = write(tmp_path / "closed" / "new")
        assert "Permission denied" in text
    (tmp_path / "closed").chmod(0o777)


def test_names_in_the_source_that_are_no_utf_8(source, tmp_path):
    name = os.fsdecode(b"caf\xe9")
    (source / name).mkdir()
    (source / name / name).write_text("x")
    report = prune(plan(source, raw_recipe(0.5)), tmp_path / "target")
    assert f"{name}/{name}" in report.copied
    assert (tmp_path / "target" / name / name).read_text() == "x"


@pytest.mark.parametrize("goal", ["self", "..", "nowhere"])
def test_a_link_that_leads_nowhere_or_round(source, goal):
    (source / "self").symlink_to(goal)
    assert "self cannot be read: " in refuse(source)


# Files that may not be read
