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

WEIGHTS = {"layers.0.weight": torch.randn(8, 8).bfloat16()}


@pytest.fixture
def source(tmp_path):
    return tiny_checkpoints.save(tmp_path / "source", WEIGHTS)


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


def test_a_destination_in_a_folder_that_may_not_be_written_or_entered(source, tmp_path):
    made = plan(source, raw_recipe(0.5))
    (tmp_path / "closed").mkdir()
    for mode in (0o555, 0o444):
        (tmp_path / "closed").chmod(mode)
        with without_root_privileges(), pytest.raises(OutputError, match="Permission denied"):
            prune(made, tmp_path / "closed" / "new")
    (tmp_path / "closed").chmod(0o777)


@pytest.mark.parametrize("goal", ["self", "..", "nowhere"])
def test_a_link_that_leads_nowhere_or_round(source, goal):
    (source / "self").symlink_to(goal)
    with pytest.raises(CheckpointError, match="self cannot be read: "):
        open_checkpoint(source)
