"""A source file that may not be read is found before any work, and named with all others."""

import errno
import os

import pytest
import torch

from distprune.files.checkpoints.checkpoint import open_checkpoint
from distprune.files.errors import CheckpointError
from helpers import tiny_checkpoints
from helpers.permissions import without_root_privileges

WEIGHTS = {"layers.0.weight": torch.randn(8, 8).bfloat16()}
CLOSED = ("model.safetensors", "merges.txt", "code/secret.py")


@pytest.fixture
def source(tmp_path):
    source = tiny_checkpoints.save(tmp_path / "source", WEIGHTS)
    (source / "code").mkdir()
    (source / "merges.txt").write_text("x")
    (source / "code" / "secret.py").write_text("x")
    return source


def check(source):
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    assert error.value.exit_code == 3
    for name in CLOSED:
        assert f"{name} cannot be read: Permission denied." in error.value.problems
    assert len(error.value.problems) == len(CLOSED)


def test_all_are_named_at_once_when_the_system_refuses(source, monkeypatch):
    paths = {os.path.realpath(source / name) for name in CLOSED}
    real_open = os.open

    def refusing(path, *args, **kwargs):
        if os.path.realpath(path) in paths:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: os.fdopen(refusing(path, 0), "rb"))
    check(source)


def test_by_the_permissions_of_the_files(source):
    for name in CLOSED:
        (source / name).chmod(0)
    with without_root_privileges():
        with pytest.raises(PermissionError):
            (source / "merges.txt").read_bytes()
        check(source)


def test_the_index_and_the_config_keep_no_other_file_from_being_named(tmp_path):
    source = tiny_checkpoints.save(tmp_path / "source", WEIGHTS, {"b.weight": torch.ones(2, 2)})
    closed = {
        "config.json", "model.safetensors.index.json", "tokenizer.json",
        "model-00002-of-00002.safetensors",
    }  # fmt: skip
    for name in closed:
        (source / name).chmod(0)
    with without_root_privileges(), pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    found = sorted(error.value.problems)
    assert found == sorted(f"{name} cannot be read: Permission denied." for name in closed)


@pytest.mark.parametrize("mode", [0o333, 0o666])
def test_a_folder_in_it_that_may_not_be_listed_or_entered(source, mode):
    (source / "code").chmod(mode)
    with without_root_privileges(), pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    (source / "code").chmod(0o777)
    (problem,) = error.value.problems
    assert problem.startswith("code") and "Permission denied" in problem


@pytest.mark.parametrize("mode", [0o333, 0o666])
def test_a_source_that_may_not_be_listed_or_entered(source, mode):
    source.chmod(mode)
    with without_root_privileges(), pytest.raises(CheckpointError) as error:
        open_checkpoint(source)
    source.chmod(0o777)
    assert "Permission denied" in str(error.value) and error.value.exit_code == 3
