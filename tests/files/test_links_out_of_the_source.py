"""A link that leaves the source is refused by name; copies are as private as their source."""

import os

import pytest
import torch

from distprune.files.applying import Application
from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.errors import CheckpointError
from distprune.files.planning import plan
from distprune.files.pruning import prune
from distprune.files.recipe import FileRecipe
from helpers import tiny_checkpoints

WEIGHTS = {"layers.0.weight": torch.randn(8, 8).bfloat16()}


@pytest.fixture
def source(tmp_path):
    return tiny_checkpoints.save(tmp_path / "source", WEIGHTS)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.mkdir()
    (path / "shadow").write_text("root:x")
    return path


def link_file(source, secret):
    (source / "merges.txt").symlink_to(secret / "shadow")
    return "merges.txt", secret / "shadow"


def link_folder(source, secret):
    (source / "extra").symlink_to(secret, target_is_directory=True)
    return "extra", secret


def link_by_way_of_the_folder(source, secret):
    (source / "merges.txt").symlink_to(f"../{source.name}/../{secret.name}/shadow")
    return "merges.txt", secret / "shadow"


def link_of_a_link(source, secret):
    (secret.parent / "between").symlink_to(secret / "shadow")
    (source / "merges.txt").symlink_to("../between")
    return "merges.txt", secret / "shadow"


def link_weights(source, secret):
    (source / "model.safetensors").rename(secret / "model.safetensors")
    (source / "model.safetensors").symlink_to(secret / "model.safetensors")
    return "model.safetensors", secret / "model.safetensors"


def link_to_a_folder_with_a_longer_name(source, secret):
    longer = source.with_name(source.name + "-private")
    secret.rename(longer)
    (source / "merges.txt").symlink_to(longer / "shadow")
    return "merges.txt", longer / "shadow"


@pytest.mark.parametrize(
    "link",
    [
        link_file,
        link_folder,
        link_by_way_of_the_folder,
        link_of_a_link,
        link_weights,
        link_to_a_folder_with_a_longer_name,
    ],
)
def test_it_is_refused_by_name_unless_links_are_trusted(source, secret, link, tmp_path):
    name, goal = link(source, secret)
    with pytest.raises(CheckpointError) as error:
        plan(source, FileRecipe(0.5))
    (problem,) = error.value.problems
    assert problem.startswith("a link leads out") and f"{name} (to {goal})" in problem
    assert "--follow-links" in problem
    prune(plan(source, FileRecipe(0.5), follow_links=True), tmp_path / "target")
    names = {str(p.relative_to(tmp_path / "target")) for p in (tmp_path / "target").rglob("*")}
    assert name in names


def cache_of(tmp_path, source, model):
    """A model of the hub cache with the files of a folder, and its snapshot."""
    blobs = tmp_path / "hub" / model / "blobs"
    blobs.parent.mkdir(parents=True)
    source.rename(blobs)
    snapshot = blobs.parent / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    return snapshot


def test_a_snapshot_may_link_into_its_own_cache_only(source, secret, tmp_path):
    other = tmp_path / "hub" / "models--someone--other" / "blobs"
    other.mkdir(parents=True)
    (other / "private").write_text("x")
    snapshot = cache_of(tmp_path, source, "models--org--name")
    assert len(open_checkpoint(snapshot).others) == 2
    (snapshot / "merges.txt").symlink_to("../../../models--someone--other/blobs/private")
    with pytest.raises(CheckpointError, match=r"merges\.txt"):
        open_checkpoint(snapshot)


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
        prune(plan(source, FileRecipe(0.5)), target)
    else:
        prune(plan(source, FileRecipe(0.5)), tmp_path / "masks")
        Application(tmp_path / "masks", source).write(target)
    found = modes(target)
    assert {name: found[name] for name in modes(source)} == {
        "": 0o750, "code": 0o700, "code/run.sh": 0o755, "config.json": 0o600,
        "model.safetensors": 0o640, "tokenizer.json": 0o644,
    }  # fmt: skip
    assert found["distprune/masks.safetensors"] == 0o640
